"""Random arrays for tests of functions of the parameters."""

import jax
import numpy as np


def random_like(weights, seed, scale=1.0):
    """Return normally distributed float32 arrays with the shapes of a tree of `Weight`s."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda w: (scale * rng.normal(size=w.shape)).astype(np.float32), weights)
