"""Products that are used in float32, of operands that may be shorter, and their gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.config import ModelConfig
from jaxgpt.models.transformer import logits
from jaxgpt.models.xla_attention import inner_products


def of_seven_tokens(x_BTD, w_VD):
    return logits(x_BTD, w_VD, 0, ModelConfig(vocab_size=7))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("product", "subscripts", "shapes"),
    [
        (of_seven_tokens, "...D,VD->...V", [(3, 5, 8), (7, 8), (3, 5, 7)]),
        (inner_products, "BTHK,BSHK->BHTS", [(3, 5, 2, 4), (3, 10, 2, 4), (3, 2, 5, 10)]),
    ],
)
def test_gradients_are_those_that_jax_derives(product, subscripts, shapes, dtype):
    """From what arrives in the operands' dtype: JAX would multiply it in float32."""
    x, y = (jax.random.normal(jax.random.key(i), shapes[i], dtype) for i in range(2))
    d = jax.random.normal(jax.random.key(2), shapes[2])

    def jaxs(x, y):
        return jnp.einsum(subscripts, x, y, preferred_element_type=jnp.float32)

    (found, d_found), (expected, d_expected) = (jax.vjp(f, x, y) for f in (product, jaxs))
    if product == of_seven_tokens:
        expected = expected.astype(dtype)
    np.testing.assert_array_equal(found, np.float32(expected))
    assert found.dtype == "float32"
    rounded = d.astype(dtype).astype(jnp.float32)
    for ours, theirs in zip(d_found(d), d_expected(rounded), strict=True):
        assert ours.dtype == theirs.dtype == x.dtype
        rtol = 1e-6 if dtype == "float32" else 2**-7  # one step of bfloat16
        np.testing.assert_allclose(np.float32(ours), np.float32(theirs), rtol=rtol, atol=1e-6)
