"""Dropout by random numbers of 16 bits, of which a word that is drawn has two."""

import jax
import jax.numpy as jnp


def dropped(x: jax.Array, rate: float, key: jax.Array) -> jax.Array:
    """x with zeros in place of a share of its elements; the others grow by 1 / (1 - rate).

    Drawing the numbers takes a good part of a small model's step on CPUs; `nnx.Dropout` draws
    twice as many words.

    Args:
        rate: the probability of a zero, taken to the next multiple of 2^-16.
    """
    *rest, n = x.shape
    words = jax.random.bits(key, (*rest, -(-n // 2)), jnp.uint32)
    halves = jnp.concatenate([words & 0xFFFF, words >> 16], axis=-1)[..., :n]
    return jnp.where(halves >= round(rate * 2**16), x * (1 / (1 - rate)), 0)
