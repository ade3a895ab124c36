import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.kernels.attention import (
    TokenPositions,
    blockwise_attention,
    causal_attention,
    inner_products,
    xla_attention,
)

pytestmark = pytest.mark.usefixtures("exact_products")


def full(attend, q, k, v, keys_BH=None, **options):
    """Attention of one document without a window."""
    at = TokenPositions(jnp.arange(q.shape[1]))
    return attend(q, k, v, at, at, None, keys_BH, **options)


@pytest.mark.gpu
def test_it_is_jaxs_causal_attention():
    q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 9, 4, 8))
    expected = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")
    np.testing.assert_allclose(full(xla_attention, q, k, v), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
def test_dropout_keeps_the_mean():
    q = k = jnp.zeros((1, 64, 1, 8))
    v = jnp.ones((1, 64, 1, 8))
    keys = jax.random.split(jax.random.key(0), (200, 1, 1))  # for each row and head
    out = jax.vmap(lambda keys_BH: full(xla_attention, q, k, v, keys_BH, dropout=0.2))(keys)
    assert float(out.mean()) == pytest.approx(1.0, abs=0.01)
    assert float(out[:, :, 0, :].std()) > 0


@pytest.mark.parametrize(
    "T", [1, 7, *(pytest.param(T, marks=pytest.mark.long) for T in (64, 300, 1024))]
)
@pytest.mark.gpu
def test_blocks_of_queries_give_the_same_attention_and_gradients(T):
    qkv = jax.random.normal(jax.random.key(T), (3, 2, T, 2, 8))

    def jaxs(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")

    def ours(q, k, v):
        return full(causal_attention, q, k, v)

    for found, expected in zip(*(with_gradients(f, qkv) for f in (ours, jaxs)), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def with_gradients(attend, qkv):
    """The result, and the gradients of q, k and v of the sum of its squares."""
    return attend(*qkv), *jax.grad(lambda qkv: (attend(*qkv) ** 2).sum())(qkv)


@pytest.mark.parametrize("kernel", [causal_attention, blockwise_attention])
@pytest.mark.parametrize("window", [None, 1, 50, 200])
@pytest.mark.parametrize("has_documents", [False, True])
def test_blocks_are_the_whole(kernel, window, has_documents):
    """Attention in blocks, of some keys only, against all scores at once."""
    q, k, v = (
        jax.random.normal(jax.random.key(i), (2, 256, heads, 8))
        for i, heads in enumerate((4, 2, 2))
    )
    at = TokenPositions(jnp.arange(256))
    if has_documents:
        positions = jnp.array([[*range(100), *range(156)], range(256)])
        at = TokenPositions(positions, jnp.array([[0] * 100 + [1] * 156, [0] * 256]))

    def whole(q, k, v):
        return xla_attention(q, k, v, at, at, window)

    def blocks(q, k, v):
        return kernel(q, k, v, at, at, window, None)

    outcomes = (with_gradients(attend, (q, k, v)) for attend in (blocks, whole))
    for found, expected in zip(*outcomes, strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_of_the_scores_are_products_in_the_operands_dtype(dtype):
    def jaxs(q, k):
        return jnp.einsum("BTHK,BSHK->BHTS", q, k, preferred_element_type=jnp.float32)

    q, k = (jax.random.normal(jax.random.key(T), (3, T, 2, 4), dtype) for T in (5, 10))
    (found, backward), (expected, jaxs_backward) = (
        jax.vjp(f, q, k) for f in (inner_products, jaxs)
    )
    np.testing.assert_array_equal(found, expected)
    d = jax.random.normal(jax.random.key(2), found.shape)
    rounded = d.astype(dtype).astype(jnp.float32)
    for ours, theirs in zip(backward(d), jaxs_backward(rounded), strict=True):
        assert ours.dtype == theirs.dtype == dtype
        rtol = 1e-6 if dtype == "float32" else 2**-7  # one unit in the last place of bfloat16
        np.testing.assert_allclose(np.float32(ours), np.float32(theirs), rtol=rtol, atol=1e-6)
    dots = [e for e in jax.make_jaxpr(backward)(d).eqns if e.primitive.name == "dot_general"]
    assert len(dots) == 2 and all(v.aval.dtype == dtype for e in dots for v in e.invars)


@pytest.mark.long
@pytest.mark.gpu
def test_blocks_of_queries_drop_different_weights():
    """Each block drops weights at the given rate, at positions that differ from other blocks."""
    T, rate = 256, 0.3
    v = jnp.broadcast_to(jnp.eye(T)[None, :, None], (1, T, 1, T))  # what comes out is the weights
    keys_BH = jax.random.key(3)[None, None]
    same = jnp.zeros((1, T, 1, 4))
    kept_TS = full(causal_attention, same, same, v, keys_BH, dropout=rate)[0, :, 0] > 0
    past_TS = np.tri(T, dtype=bool)
    assert not (kept_TS & ~past_TS).any()
    assert abs(kept_TS[past_TS].mean() - (1 - rate)) < 0.01
    # With one key for both blocks these would be the same: words are numbered along rows, and
    # those of the second block are twice as long. Independent: 0.7^2 + 0.3^2 = 0.58.
    first, second = kept_TS[64:128:2, :64], kept_TS[160:192, :64]
    assert abs((first == second).mean() - 0.58) < 0.05


@pytest.mark.parametrize("window", [1, 2, 31, 32, 33, 34])
@pytest.mark.gpu
def test_the_first_query_of_a_block_sees_its_whole_window(window):
    """With 64 tokens, the second block of queries begins at token 32."""
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 64, 2, 8))
    expected = jax.nn.dot_product_attention(
        q, k, v, is_causal=True, local_window_size=(window - 1, 0), implementation="xla"
    )
    at = TokenPositions(jnp.arange(64))
    found = causal_attention(q, k, v, at, at, window, None)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_every_block_of_a_loop_drops_different_weights():
    """With 258 tokens, each of two blocks is a loop over three blocks of 43 queries."""
    T, rate = 258, 0.3
    v = jnp.broadcast_to(jnp.eye(T)[None, :, None], (1, T, 1, T))  # the output is the weights
    same = jnp.zeros(v.shape)
    keys_BH = jax.random.key(3)[None, None]
    kept_TS = full(blockwise_attention, same, same, v, keys_BH, dropout=rate)[0, :, 0] > 0
    first, second = kept_TS[20:43, :20], kept_TS[63:86, :20]
    # Independent: 0.7^2 + 0.3^2 = 0.58. The standard deviation over 460 weights is 0.023.
    assert abs((first == second).mean() - 0.58) < 0.1
