"""Causal self-attention: which kernel runs, and the kernels."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxgpt.config import ModelConfig, UsageError
from jaxgpt.kernels.dropout import drop_elements

BLOCK = 128  # positions, of `blockwise_attention`
# Of `causal_attention`: two blocks from 64 positions on, three or four where each has 128. On CPUs,
# more or shorter ones take longer than what they leave out saves.
MOST_BLOCKS, LEAST_POSITIONS, LEAST_POSITIONS_OF_TWO = 4, 128, 32

# (q_BTHK, k_BTHK, v_BTHK, dropout keys_BH or None) -> out_BTHK
Attention = Callable[[jax.Array, jax.Array, jax.Array, jax.Array | None], jax.Array]


def cuda_capability(device: jax.Device) -> float:
    """Return the compute capability of an NVIDIA GPU, such as 9.0; 0 of any other device."""
    try:
        return float(getattr(device, "compute_capability", 0))
    except ValueError:  # AMD's are words: gfx90a
        return 0.0


def choose_attention(config: ModelConfig, dtype: str, capability: float) -> tuple[str, str]:
    """Return the kernel that runs, `xla` or `cudnn`, and why; `cuda_capability` is of the devices.

    Raises:
        UsageError: if model.attention=cudnn cannot run.
    """
    head_dim = config.n_embd // config.n_head
    largest = 256 if capability >= 9 else 128  # of a head: Hopper's kernels take more
    obstacle = None
    if capability < 8:
        obstacle = "cuDNN attention needs an NVIDIA GPU, A100 or newer"
    elif dtype not in ("bfloat16", "float16"):
        obstacle = f"cuDNN needs train.dtype=bfloat16, not {dtype}"
    elif head_dim % 8 or head_dim > largest:
        obstacle = (
            f"cuDNN needs a head size that is a multiple of 8 up to {largest}, not {head_dim}"
        )
    elif config.dropout:
        obstacle = f"this cuDNN path has no dropout, and model.dropout={config.dropout}"
    if config.attention == "cudnn" and obstacle:
        raise UsageError(f"model.attention=cudnn: {obstacle}; use auto or xla")
    if config.attention == "xla":
        return "xla", "model.attention=xla"
    return ("xla", obstacle) if obstacle else ("cudnn", "flash attention, O(T) memory")


def fallback_warnings(
    config: ModelConfig, kernel: str, reason: str, capability: float
) -> list[str]:
    """Return a warning where an NVIDIA GPU could have cuDNN's kernel, and this run does without."""
    if kernel == "cudnn" or config.attention != "auto" or capability < 8:
        return []
    return [f"attention runs without cuDNN, in O(T^2) memory and slower: {reason}"]


def make_attention(kernel: str, dropout: float) -> Attention:
    """Return the attention function of a kernel that `choose_attention` named."""
    if kernel == "cudnn":
        return cudnn_attention
    return functools.partial(causal_attention, dropout=dropout)


def cudnn_attention(
    q_BTHK: jax.Array, k_BTHK: jax.Array, v_BTHK: jax.Array, keys_BH: jax.Array | None
) -> jax.Array:
    """Attend by cuDNN's fused flash kernel, which never holds the T x T scores."""
    del keys_BH  # choose_attention does not pick this kernel with dropout
    return jax.nn.dot_product_attention(
        q_BTHK, k_BTHK, v_BTHK, is_causal=True, implementation="cudnn"
    )


def blockwise_attention(
    q_BTHK: jax.Array, k_BTHK: jax.Array, v_BTHK: jax.Array, keys_BH: jax.Array | None
) -> jax.Array:
    """Attend a block of positions after the other, in memory that grows with T and not T^2.

    It stands for cuDNN's kernel where `jaxgpt.plan` compiles without an NVIDIA GPU.
    """
    del keys_BH
    B, T, H, K = q_BTHK.shape
    size = math.gcd(T, BLOCK)

    @jax.checkpoint
    def attend(_, block):
        q_BtHK, position_offset = block
        return None, xla_attention(q_BtHK, k_BTHK, v_BTHK, position_offset=position_offset)

    blocks = q_BTHK.reshape(B, T // size, size, H, K).swapaxes(0, 1)
    _, out = jax.lax.scan(attend, None, (blocks, jnp.arange(0, T, size)))
    return out.swapaxes(0, 1).reshape(B, T, H, K)


def causal_attention(
    q_BTHK: jax.Array,
    k_BTHK: jax.Array,
    v_BTHK: jax.Array,
    keys_BH: jax.Array | None = None,
    dropout: float = 0.0,
) -> jax.Array:
    """Attend in a few blocks of queries, which do not meet the keys after their last.

    Of the T x T scores, n blocks compute the share (n + 1) / 2n. Which weights are dropped depends
    on the blocks.
    """
    T = q_BTHK.shape[1]
    n = max(1, min(2, T // LEAST_POSITIONS_OF_TWO), min(MOST_BLOCKS, T // LEAST_POSITIONS))
    cuts = [T * i // n for i in range(1, n)]
    q_blocks, k_blocks, v_blocks = (jnp.split(x, cuts, axis=1) for x in (q_BTHK, k_BTHK, v_BTHK))
    out = []
    for i, (position_offset, q_BtHK) in enumerate(zip([0, *cuts], q_blocks, strict=True)):
        k_BsHK, v_BsHK = (jnp.concatenate(x[: i + 1], axis=1) for x in (k_blocks, v_blocks))
        out.append(xla_attention(q_BtHK, k_BsHK, v_BsHK, dropout, keys_BH, position_offset))
    return jnp.concatenate(out, axis=1)


def xla_attention(
    q_BTHK: jax.Array,
    k_BSHK: jax.Array,
    v_BSHK: jax.Array,
    dropout: float = 0.0,
    keys_BH: jax.Array | None = None,
    position_offset: int | jax.Array = 0,
) -> jax.Array:
    """Return softmax(q k^T / sqrt(K)) v over past positions, in q's dtype; softmax in float32.

    Args:
        dropout: rate at which attention weights are dropped where `keys_BH` are given.
        position_offset: position of the first query.
    """
    T, S, K = q_BTHK.shape[1], k_BSHK.shape[1], q_BTHK.shape[-1]
    scores_BHTS = inner_products(q_BTHK * K**-0.5, k_BSHK)
    causal_TS = position_offset + jnp.arange(T)[:, None] >= jnp.arange(S)[None, :]
    weights_BHTS = jax.nn.softmax(jnp.where(causal_TS, scores_BHTS, -jnp.inf), axis=-1)
    if keys_BH is not None and dropout > 0:

        def drop(weights_TS: jax.Array, key: jax.Array) -> jax.Array:
            return drop_elements(weights_TS, dropout, jax.random.fold_in(key, position_offset))

        weights_BHTS = jax.vmap(jax.vmap(drop))(weights_BHTS, keys_BH)
    return jnp.einsum("BHTS,BSHK->BTHK", weights_BHTS.astype(v_BSHK.dtype), v_BSHK)


@jax.custom_vjp
def inner_products(q_BTHK: jax.Array, k_BSHK: jax.Array) -> jax.Array:
    """Return scores of queries with the keys of their head: q k^T, float32 (B, H, T, S).

    JAX derives the gradient of k as d^T q. XLA's CPU compiler computes q^T d four times as fast,
    which makes 6 % of a small model's step: hence a gradient of our own. Its products are in the
    operands' dtype, where JAX's are in float32, which takes tensor cores twice the time or more.
    """
    return _inner_products_forward(q_BTHK, k_BSHK)[0]


def _inner_products_forward(
    q_BTHK: jax.Array, k_BSHK: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    scores_BHTS = jnp.einsum("BTHK,BSHK->BHTS", q_BTHK, k_BSHK, preferred_element_type=jnp.float32)
    return scores_BHTS, (q_BTHK, k_BSHK)


def _inner_products_backward(
    operands: tuple[jax.Array, jax.Array], d_BHTS: jax.Array
) -> tuple[jax.Array, jax.Array]:
    q_BTHK, k_BSHK = operands
    d_BHTS = d_BHTS.astype(q_BTHK.dtype)
    dq_BTHK = jnp.einsum("BHTS,BSHK->BTHK", d_BHTS, k_BSHK)
    dk_BHKS = jnp.einsum("BTHK,BHTS->BHKS", q_BTHK, d_BHTS)
    return dq_BTHK, dk_BHKS.transpose(0, 3, 1, 2)


inner_products.defvjp(_inner_products_forward, _inner_products_backward)


def without_scores(attend: Attention) -> Attention:
    """Return attention that computes its T x T scores again for the backward pass.

    The selective recomputation of arXiv 2205.05198, section 5.
    """

    @jax.custom_vjp
    def forgetful(q_BTHK, k_BTHK, v_BTHK, keys_BH):
        return attend(q_BTHK, k_BTHK, v_BTHK, keys_BH)

    def forward(*operands):
        return attend(*operands), operands

    def backward(operands, d_out_BTHK):
        # The barrier keeps XLA from computing the scores before their turn, and keeping them.
        operands, d_out_BTHK = jax.lax.optimization_barrier((operands, d_out_BTHK))
        *qkv, keys_BH = operands
        return *jax.vjp(lambda *qkv: attend(*qkv, keys_BH), *qkv)[1](d_out_BTHK), None

    forgetful.defvjp(forward, backward)
    return forgetful
