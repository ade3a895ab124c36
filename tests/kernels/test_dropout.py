import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.kernels.dropout import drop_elements


@pytest.mark.parametrize("rate", [0.1, 0.2, 0.5, 0.9])
@pytest.mark.parametrize("n", [400, 401])
def test_the_rate_is_met_and_the_mean_stays(rate, n):
    out = np.asarray(drop_elements(jnp.ones((1000, n)), rate, jax.random.key(1)))
    std = np.sqrt(rate * (1 - rate) / out.size)
    assert abs((out == 0).mean() - rate) < 5 * std + 2**-17
    np.testing.assert_allclose(out[out != 0], 1 / (1 - rate), rtol=2**-17 / (1 - rate) + 1e-6)


def test_neighbors_and_the_two_halves_of_a_word_are_independent():
    kept = np.asarray(drop_elements(jnp.ones((1000, 400)), 0.5, jax.random.key(2))) > 0
    for other in (np.roll(kept, 1, axis=0), np.roll(kept, 1, axis=1), np.roll(kept, 200, axis=1)):
        assert abs((kept == other).mean() - 0.5) < 5 * 0.5 / np.sqrt(kept.size / 2)


def test_the_type_stays():
    out = drop_elements(jnp.ones((4, 3), jnp.bfloat16), 0.5, jax.random.key(0))
    assert out.dtype == jnp.bfloat16 and set(np.unique(out.astype(np.float32))) <= {0.0, 2.0}
