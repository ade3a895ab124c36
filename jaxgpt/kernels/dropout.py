"""Dropout by random numbers of 16 bits, of which a word that is drawn has two."""

import jax
import jax.numpy as jnp


def dropped(x: jax.Array, rate: float, key: jax.Array) -> jax.Array:
    """x with zeros in place of a share of its elements; the others grow, and the mean stays.

    Drawing the numbers takes a good part of a small model's step on CPUs; `nnx.Dropout` draws
    twice as many words.

    Args:
        rate: the probability of a zero, taken to the nearest multiple of 2^-16 below 1.
    """
    *rest, n = x.shape
    words = jax.random.bits(key, (*rest, -(-n // 2)), jnp.uint32)
    halves = jnp.concatenate([words & 0xFFFF, words >> 16], axis=-1)[..., :n]
    zeros = min(round(rate * 2**16), 2**16 - 1)
    return jnp.where(halves >= zeros, x * (2**16 / (2**16 - zeros)), 0)
