"""Layer normalization and its gradient, compared with Flax's, which JAX differentiates."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxgpt.kernels.norm import LayerNorm

B, T, D = 3, 5, 32


def layers(dtype, use_bias):
    """Return our layer, and Flax's in float32, with the same random parameters."""
    options = {"epsilon": 1e-5, "use_bias": use_bias, "rngs": nnx.Rngs(0)}
    pair = (
        LayerNorm(D, dtype=dtype, **options),
        nnx.LayerNorm(D, dtype="float32", **options),
    )
    for layer in pair:
        layer.scale.set_value(jax.random.normal(jax.random.key(1), (D,)))
        if use_bias:
            layer.bias.set_value(jax.random.normal(jax.random.key(2), (D,)))
    return pair


@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize(("dtype", "mean"), [("float32", 0), ("float32", 9), ("bfloat16", 0)])
def test_output_and_gradients_are_flax_s(dtype, mean, use_bias):
    x, dy = jax.random.normal(jax.random.key(0), (2, B, T, D))
    x, dy = (mean + x).astype(dtype), dy.astype(dtype)

    def out_and_gradients(layer, x, dy):
        out, gradient = jax.vjp(lambda layer, x: layer(x), layer, x)
        return out, *jax.tree.leaves(gradient(dy))

    ours, theirs = layers(dtype, use_bias)
    found = out_and_gradients(ours, x, dy)
    # Flax in float32, from the same numbers: in bfloat16 it would round more often than ours.
    expected = out_and_gradients(theirs, x.astype(jnp.float32), dy.astype(jnp.float32))
    assert len(found) == len(expected) == 3 + use_bias
    assert [a.dtype for a in found[:2]] == [dtype, "float32"]
    if dtype == "float32":
        np.testing.assert_array_equal(found[0], expected[0])
    rounding = {"float32": 2e-5 if mean else 2e-6, "bfloat16": 2**-8}[dtype]
    for ours, theirs in zip(found, expected, strict=True):
        difference = np.linalg.norm(np.float32(ours) - theirs)
        assert difference <= rounding * np.linalg.norm(theirs), (difference, theirs)
