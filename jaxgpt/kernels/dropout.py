"""Dropout with 16 random bits per element, which is faster on CPUs than `jax.random.bernoulli`."""

import jax
import jax.numpy as jnp


def drop_elements(x: jax.Array, rate: float, key: jax.Array) -> jax.Array:
    """Return x with random elements set to 0, and all other elements divided by 1 - `rate`.

    x is a floating-point array with at least one dim, and the result has the same shape and dtype.
    Each element is set to 0 with probability `rate` (from 0 to 1), which is rounded to a multiple
    of 2^-16 and limited to 1 - 2^-16.
    """
    *rest, n = x.shape
    words = jax.random.bits(key, (*rest, -(-n // 2)), jnp.uint32)
    halves = jnp.concatenate([words & 0xFFFF, words >> 16], axis=-1)[..., :n]
    n_zeros = min(round(rate * 2**16), 2**16 - 1)
    return jnp.where(halves >= n_zeros, x * (2**16 / (2**16 - n_zeros)), 0)
