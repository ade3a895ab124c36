"""Products of activations and weights on one device."""

import functools

import jax
import jax.numpy as jnp


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def product(x: jax.Array, w: jax.Array, n: int) -> jax.Array:
    """x W, summed over the last n dimensions of x and the first n of W.

    The gradient of W is asked for in W's own order of dimensions. What JAX derives from
    jnp.tensordot is that of its transpose, which XLA gets on CPUs by transposing activations:
    along with what they were computed from, that is a third of a step of a small model.
    """
    return jnp.tensordot(x, w, n)


def _forward(x: jax.Array, w: jax.Array, n: int) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return product(x, w, n), (x, w)


def _backward(
    n: int, operands: tuple[jax.Array, jax.Array], dy: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, w = operands
    rows = tuple(range(x.ndim - n))
    outputs_of_dy = tuple(range(x.ndim - n, dy.ndim))
    outputs_of_w = tuple(range(n, w.ndim))
    dx = jax.lax.dot_general(dy, w, ((outputs_of_dy, outputs_of_w), ((), ())))
    dw = jax.lax.dot_general(x, dy, ((rows, rows), ((), ())))
    return dx, dw


product.defvjp(_forward, _backward)
