import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.model.gelu import gelu

X = np.linspace(-12, 12, 4801)
PHI = np.array([0.5 * math.erfc(-x / math.sqrt(2)) for x in X])
DENSITY = np.exp(-0.5 * X * X) / math.sqrt(2 * math.pi)


def test_gelu_is_x_times_the_normal_distribution_function():
    np.testing.assert_allclose(gelu(jnp.float32(X)), X * PHI, rtol=1e-6, atol=1e-6)


def test_its_gradient_is_the_formula():
    found = jax.vmap(jax.grad(gelu))(jnp.float32(X))
    np.testing.assert_allclose(found, PHI + X * DENSITY, rtol=1e-6, atol=1e-6)


def test_it_keeps_the_type_of_its_input():
    assert gelu(jnp.bfloat16([1.0])).dtype == jnp.bfloat16
