import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.config import ModelConfig, UsageError
from jaxgpt.models.attention import (
    AttentionSetting,
    TokenPositions,
    blockwise_attention,
    causal_attention,
    choose_attention,
    cuda_capability,
    fallback_warnings,
    inner_products,
    xla_attention,
)

pytestmark = pytest.mark.usefixtures("exact_products")

GPU_MODEL = ModelConfig(n_head=12, n_embd=768)


def full(attend, q, k, v, keys_BH=None, **options):
    """Attention of one document without a window."""
    at = TokenPositions(jnp.arange(q.shape[1]))
    return attend(q, k, v, at, at, None, keys_BH, **options)


@pytest.mark.parametrize(
    ("config", "dtype", "capability", "kernel", "reason"),
    [
        (GPU_MODEL, "bfloat16", 9.0, "cudnn", "flash"),
        (GPU_MODEL, "bfloat16", 8.0, "cudnn", "flash"),
        (GPU_MODEL, "bfloat16", 7.0, "xla", "A100 or newer"),  # V100
        (GPU_MODEL, "bfloat16", 0.0, "xla", "NVIDIA"),  # CPU, AMD
        (GPU_MODEL, "float32", 9.0, "xla", "bfloat16"),
        (ModelConfig(n_head=1, n_embd=132), "bfloat16", 9.0, "xla", "head size"),
        (ModelConfig(n_head=2, n_embd=320), "bfloat16", 9.0, "cudnn", "flash"),  # 160 each
        (ModelConfig(n_head=2, n_embd=320), "bfloat16", 8.0, "xla", "8 up to 128, not 160"),
        (ModelConfig(n_head=1, n_embd=264), "bfloat16", 9.0, "xla", "8 up to 256, not 264"),
        (ModelConfig(dropout=0.1), "bfloat16", 9.0, "xla", "dropout"),
        (ModelConfig(attention="xla"), "bfloat16", 9.0, "xla", "model.attention=xla"),
    ],
)
def test_the_kernel_is_chosen_and_the_choice_explained(config, dtype, capability, kernel, reason):
    chosen, why = choose_attention(AttentionSetting(config, dtype, "gpu", capability))
    assert chosen == kernel
    assert reason in why


@pytest.mark.parametrize(
    ("config", "capability", "n_warnings"),
    [
        (ModelConfig(dropout=0.1), 9.0, 1),
        (ModelConfig(dropout=0.1, attention="xla"), 9.0, 0),  # as asked for
        (ModelConfig(dropout=0.1), 7.0, 0),  # could not have it in any case
        (GPU_MODEL, 9.0, 0),  # has it
    ],
)
def test_a_gpu_that_does_without_cudnn_is_a_warning(config, capability, n_warnings):
    setting = AttentionSetting(config, "bfloat16", "gpu", capability)
    warnings = fallback_warnings(setting, *choose_attention(setting))
    assert len(warnings) == n_warnings and all("dropout" in warning for warning in warnings)


def test_asking_for_cudnn_without_a_gpu_is_refused():
    with pytest.raises(UsageError, match="model.attention=cudnn: .*use auto"):
        choose_attention(AttentionSetting(ModelConfig(attention="cudnn"), "bfloat16"))


@pytest.mark.parametrize(("told", "expected"), [("9.0", 9.0), ("gfx90a", 0.0), (None, 0.0)])
def test_only_nvidias_devices_have_a_cuda_capability(told, expected):
    device = types.SimpleNamespace(**({} if told is None else {"compute_capability": told}))
    assert cuda_capability(device) == expected


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
    return attend(*qkv), *jax.grad(lambda qkv: (attend(*qkv) ** 2).sum())(qkv)


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
