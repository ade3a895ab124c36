import jax
import numpy as np
import pytest

from jaxgpt.kernels.softmax import _in_one_pass, _in_two_passes


@pytest.mark.parametrize("reduction", [_in_one_pass, _in_two_passes])
def test_the_maximum_and_the_sum_of_exponentials_are_those_of_float64(reduction):
    x = 20 * np.random.default_rng(0).normal(size=(3, 4, 1001)).astype(np.float32)
    x[0, 0, 100:] = -np.inf  # as in the padding of a vocabulary
    x[0, 1] = 1e4  # exp would overflow
    x[0, 2, 1:] = -np.inf
    largest, sums = jax.jit(reduction)(x)
    expected = x.max(axis=-1)
    np.testing.assert_array_equal(largest, expected)
    exact = np.exp(np.float64(x) - expected[..., None]).sum(axis=-1)
    np.testing.assert_allclose(sums, exact, rtol=1e-6)


@pytest.mark.parametrize("reduction", [_in_one_pass, _in_two_passes])
def test_a_nan_makes_the_sum_nan(reduction):
    x = np.zeros((2, 7), np.float32)
    x[0, 3] = np.nan
    _, sums = jax.jit(reduction)(x)
    np.testing.assert_array_equal(np.isnan(sums), [True, False])
