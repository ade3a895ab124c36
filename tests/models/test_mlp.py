import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.config import load_config
from jaxgpt.models.mlp import MLPS, gated, gelu
from jaxgpt.models.weights import layer_matrices

X = np.linspace(-12, 12, 4801)
PHI = np.array([0.5 * math.erfc(-x / math.sqrt(2)) for x in X])
DENSITY = np.exp(-0.5 * X * X) / math.sqrt(2 * math.pi)


def test_gelu_is_x_times_the_normal_distribution_function():
    np.testing.assert_allclose(gelu(jnp.float32(X)), X * PHI, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("mlp", MLPS)
def test_the_config_counts_the_elements_of_all_matrices(mlp):
    model = load_config("tiny", f"model.mlp={mlp}", "model.vocab_size=256").model
    assert model.matrix_elements == sum(weight.size for weight in layer_matrices(model))


def test_its_gradient_is_the_formula():
    found = jax.vmap(jax.grad(gelu))(jnp.float32(X))
    np.testing.assert_allclose(found, PHI + X * DENSITY, rtol=1e-6, atol=1e-6)


def test_in_bfloat16_it_is_as_exact_as_that_allows():
    x = jnp.bfloat16(X[X > -4])
    phi = np.array([0.5 * math.erfc(-x / math.sqrt(2)) for x in np.float64(x)])
    density = np.exp(-0.5 * np.float64(x) ** 2) / math.sqrt(2 * math.pi)
    found, gradients = gelu(x), jax.vmap(jax.grad(gelu))(x)
    assert found.dtype == gradients.dtype == jnp.bfloat16
    # Half a unit of the last of 8 bits, and float32's 1 + erf.
    np.testing.assert_allclose(np.float64(found), x * phi, rtol=2**-8, atol=1e-6)
    np.testing.assert_allclose(np.float64(gradients), phi + x * density, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize(("dtype", "rounding"), [("float32", 1e-6), ("bfloat16", 2**-8)])
def test_swiglu_and_its_gradient_are_the_formulas(dtype, rounding):
    rng = np.random.default_rng(0)
    both = jnp.asarray(rng.normal(size=(2, 3, 2, 64)) * 4, dtype)
    dy = jnp.asarray(rng.normal(size=(2, 3, 64)), dtype)
    y, pull_back = jax.vjp(lambda both: gated(jax.nn.silu, both), both)
    (gradient,) = pull_back(dy)
    assert y.dtype == gradient.dtype == dtype
    gate, up, d = np.float64(both[:, :, 0]), np.float64(both[:, :, 1]), np.float64(dy)
    sigmoid = 1 / (1 + np.exp(-gate))
    d_gate = d * up * sigmoid * (1 + gate * (1 - sigmoid))
    expected = np.stack([d_gate, d * gate * sigmoid], axis=2)
    np.testing.assert_allclose(np.float64(y), gate * sigmoid * up, rtol=rounding, atol=1e-6)
    np.testing.assert_allclose(np.float64(gradient), expected, rtol=rounding, atol=2e-6)
