"""Rotary position embeddings (RoPE, arXiv 2104.09864), with Llama 3.1's scaling."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Rotation(NamedTuple):
    """Cosines and sines of the angles at some positions, float32, for F = K/2 pairs."""

    cos_TF: jax.Array  # (T, F), or (B, T, F) if each row has positions of its own
    sin_TF: jax.Array

    def __call__(self, x_BTHK: jax.Array) -> jax.Array:
        """Return x with number i of every head turned against number i + K/2, in x's dtype.

        Hugging Face's order of pairs; the original code of Llama turns 2i against 2i + 1.
        """
        # By halves: with [-second, first] in one array XLA's CPU step takes 7 % longer.
        first, second = jnp.split(x_BTHK.astype(jnp.float32), 2, axis=-1)
        cos_T1F, sin_T1F = self.cos_TF[..., None, :], self.sin_TF[..., None, :]
        turned = first * cos_T1F - second * sin_T1F, second * cos_T1F + first * sin_T1F
        return jnp.concatenate(turned, axis=-1).astype(x_BTHK.dtype)


def make_rotation(
    head_size: int, positions_T: jax.Array, theta: float, scaling: tuple[float, ...]
) -> Rotation:
    """Return the rotation of queries and keys at these positions, (T,) or (B, T)."""
    frequencies_F = rope_frequencies(head_size, theta, scaling)
    angles_TF = positions_T.astype(jnp.float32)[..., None] * frequencies_F
    return Rotation(jnp.cos(angles_TF), jnp.sin(angles_TF))


def rope_frequencies(head_size: int, theta: float, scaling: tuple[float, ...] = ()) -> np.ndarray:
    """Return the angles per position of the K/2 pairs, float32.

    Args:
        theta: base of the wavelengths.
        scaling: as model.rope_scaling. One factor divides all frequencies. Llama 3.1's scaling
            divides those of wavelengths longer than original_max_position / low_freq_factor by its
            factor, keeps those shorter than original_max_position / high_freq_factor, and goes from
            one to the other in between.
    """
    frequencies = theta ** -(np.arange(0, head_size, 2, dtype=np.float64) / head_size)
    if len(scaling) == 1:
        frequencies = frequencies / scaling[0]
    elif scaling:
        factor, low, high, original = scaling
        turns = original * frequencies / (2 * math.pi)  # in the original context
        share = np.clip((turns - low) / (high - low), 0, 1)
        frequencies = frequencies * (share + (1 - share) / factor)
    return frequencies.astype(np.float32)
