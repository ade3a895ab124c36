"""Matmul of activations and weights, with a gradient that is faster on CPUs than JAX's own.

With `jnp.tensordot` and its gradient, a step of `shakespeare_char_cpu` takes 1.66 times as long.
"""

import functools
import math

import jax
import jax.numpy as jnp


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def matmul(x: jax.Array, w: jax.Array, n: int) -> jax.Array:
    """Return x W, contracted over the last n >= 1 dims of x and the first n dims of W.

    The result has the remaining dims of x, followed by the remaining dims of W. x and W must have
    the same dtype, which is also the dtype of the result. Only reverse-mode differentiation is
    supported.

    A single matmul computes the gradient of W, with the dims in W's order. JAX's own gradient of
    `jnp.tensordot` is transposed, so XLA's CPU compiler has to transpose activations.
    """
    return _forward(x, w, n)[0]


def _forward(x: jax.Array, w: jax.Array, n: int) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    # Call tensordot rather than `matmul`, because jax.checkpoint's policies for saving matmul
    # results do not look inside a custom_vjp.
    return jnp.tensordot(x, w, n), (x, w)


def _backward(
    n: int, operands: tuple[jax.Array, jax.Array], dy: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return matmul_gradients(*operands, dy, n)


matmul.defvjp(_forward, _backward)


def matmul_gradients(
    x: jax.Array,
    w: jax.Array,
    dy: jax.Array,
    n: int,
    precision: jax.lax.Precision | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return the gradients of x and W for `matmul(x, w, n)`, given the result's gradient `dy`."""
    inputs = math.prod(w.shape[:n])
    x_NI, w_IO = x.reshape(-1, inputs), w.reshape(inputs, -1)
    dy_NO = dy.reshape(-1, w_IO.shape[1])
    dx = jnp.matmul(dy_NO, w_IO.T, precision=precision).reshape(x.shape)
    dw = jnp.matmul(x_NI.T, dy_NO, precision=precision).reshape(w.shape)
    return dx, dw


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def matmul_parts(x: jax.Array, w: jax.Array, n: int) -> tuple[jax.Array, ...]:
    """Return the slices of `matmul(x, w, n)` along dim n of W, as separate arrays.

    There are w.shape[n] slices, each without this dim. A separate matmul computes each slice. cuDNN
    attention needs q, k and v in contiguous arrays. Copying q, k and v out of a single result would
    move 2% more bytes in a step of `gpt2` on an H100. The gradient is computed as in `matmul`,
    because separate matmuls would not save copies in the backward pass.
    """
    return _parts_forward(x, w, n)[0]


def _parts_forward(
    x: jax.Array, w: jax.Array, n: int
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, jax.Array]]:
    def product(part: jax.Array) -> jax.Array:
        # Without the barrier, XLA merges small matmuls that read the same array.
        own_x, part = jax.lax.optimization_barrier((x, part.squeeze(n)))
        return jnp.tensordot(own_x, part, n)

    return tuple(map(product, jnp.split(w, w.shape[n], axis=n))), (x, w)


def _parts_backward(
    n: int, operands: tuple[jax.Array, jax.Array], dys: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array]:
    return _backward(n, operands, jnp.stack(dys, axis=operands[0].ndim - n))


matmul_parts.defvjp(_parts_forward, _parts_backward)
