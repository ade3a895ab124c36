"""Products of activations and weights on one device."""

import functools
import math

import jax
import jax.numpy as jnp


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def product(x: jax.Array, w: jax.Array, n: int) -> jax.Array:
    """x W, summed over the last n dimensions of x and the first n of W.

    The gradient of W is asked for as a product of two matrices, in W's own order of dimensions.
    What JAX derives from jnp.tensordot is its transpose, summed over rows and positions, which XLA
    gets on CPUs by transposing activations: along with computing them once more for that, a third
    of a step of a small model.
    """
    return _forward(x, w, n)[0]


def _forward(x: jax.Array, w: jax.Array, n: int) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    # Not by `product`: jax.checkpoint, which may be asked to keep products, does not look into it.
    return jnp.tensordot(x, w, n), (x, w)


def _backward(
    n: int, operands: tuple[jax.Array, jax.Array], dy: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, w = operands
    inputs = math.prod(w.shape[:n])
    x_NI, w_IO = x.reshape(-1, inputs), w.reshape(inputs, -1)
    dy_NO = dy.reshape(-1, w_IO.shape[1])
    return (dy_NO @ w_IO.T).reshape(x.shape), (x_NI.T @ dy_NO).reshape(w.shape)


product.defvjp(_forward, _backward)
