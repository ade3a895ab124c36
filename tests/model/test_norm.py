"""Layer normalization and its gradient against Flax's, which JAX differentiates."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxgpt.model.norm import LayerNorm, normalized

B, T, D = 3, 5, 32


def both(dtype, use_bias):
    """The two layers with the same parameters, which are not those of the beginning."""
    layers = [
        kind(D, epsilon=1e-5, use_bias=use_bias, dtype=dtype, rngs=nnx.Rngs(0))
        for kind in (LayerNorm, nnx.LayerNorm)
    ]
    for layer in layers:
        layer.scale.set_value(jax.random.normal(jax.random.key(1), (D,)))
        if use_bias:
            layer.bias.set_value(jax.random.normal(jax.random.key(2), (D,)))
    return layers


@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize(
    ("dtype", "mean", "rounding"),
    [("float32", 0, 2e-6), ("float32", 9, 1e-4), ("bfloat16", 0, 2e-2)],
)
def test_output_and_gradients_are_flax_s(dtype, mean, rounding, use_bias):
    x, dy = jax.random.normal(jax.random.key(0), (2, B, T, D))
    x, dy = (mean + x).astype(dtype), dy.astype(dtype)

    @jax.jit
    def out_and_gradients(layer, x):
        out, gradient = jax.vjp(lambda layer, x: layer(x), layer, x)
        return out, *jax.tree.leaves(gradient(dy))

    ours, theirs = (out_and_gradients(layer, x) for layer in both(dtype, use_bias))
    assert len(ours) == len(theirs) == 3 + use_bias
    for found, expected in zip(ours, theirs, strict=True):
        assert found.dtype == expected.dtype
        np.testing.assert_allclose(
            *(np.asarray(a, np.float32) for a in (found, expected)),
            rtol=rounding,
            atol=rounding * D,
        )


def test_only_cpus_get_products_with_vectors():
    x, scale = jnp.ones((B, T, D)), jnp.ones(D)
    traced = jax.jit(jax.grad(lambda x, s: normalized(x, s, 1e-5).sum(), (0, 1))).trace(x, scale)
    products = {p: traced.lower(lowering_platforms=(p,)).as_text().count("dot_general") for p in
                ("cpu", "cuda", "tpu")}  # fmt: skip
    assert products == {"cpu": 4, "cuda": 0, "tpu": 0}
