"""Causal self-attention: the choice of a kernel, and the kernels."""

import functools
import itertools
import math
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from jaxgpt.config import ModelConfig, UsageError
from jaxgpt.kernels.dropout import drop_elements

# `causal_attention` splits the queries into two blocks from 64 positions on, and into three or four
# if each has at least 128. With more or shorter blocks, CPUs lose more time than they save.
MOST_BLOCKS, LEAST_POSITIONS, LEAST_POSITIONS_OF_TWO = 4, 128, 32
BLOCK = 128  # number of queries that `blockwise_attention` processes at a time
# (q_BTHK, k_BTGK, v_BTGK, dropout keys_BH or None, starts_BT or None) -> out_BTHK. Query head h
# uses key-value head h G // H. starts_BT is set with data.document_mask: it holds the position at
# which each token's document begins, and tokens before that position are masked.
Attention = Callable[
    [jax.Array, jax.Array, jax.Array, jax.Array | None, jax.Array | None], jax.Array
]


def cuda_capability(device: jax.Device) -> float:
    """Return the compute capability of an NVIDIA GPU, such as 9.0; 0 for any other device."""
    try:
        return float(getattr(device, "compute_capability", 0))
    except ValueError:  # AMD uses words, such as gfx90a
        return 0.0


def choose_attention(
    config: ModelConfig, dtype: str, capability: float, document_mask: bool = False
) -> tuple[str, str]:
    """Return the name of the kernel to run, `xla` or `cudnn`, and the reason for the choice.

    Args:
        capability: the devices' `cuda_capability`.
        document_mask: data.document_mask.

    Raises:
        UsageError: if model.attention=cudnn cannot run.
    """
    K, T = config.head_size, config.block_size
    largest = 256 if capability >= 9 else 128  # head size: Hopper's kernels support larger heads
    obstacle = None
    if capability < 8:
        obstacle = "cuDNN attention needs an NVIDIA GPU, A100 or newer"
    elif dtype not in ("bfloat16", "float16"):
        obstacle = f"cuDNN needs train.dtype=bfloat16, not {dtype}"
    elif K % 8 or K > largest:
        obstacle = f"cuDNN needs a head size that is a multiple of 8 up to {largest}, not {K}"
    elif config.dropout:
        obstacle = f"this cuDNN path has no dropout, and model.dropout={config.dropout}"
    elif document_mask and T % 2:
        obstacle = f"cuDNN needs an even model.block_size for data.document_mask, not {T}"
    if config.attention == "cudnn" and obstacle:
        raise UsageError(f"model.attention=cudnn: {obstacle}; use auto or xla")
    if config.attention == "xla":
        return "xla", "model.attention=xla"
    if obstacle:
        return "xla", obstacle
    mask = ", and a mask of documents, 2 T^2 bytes a row" if document_mask else ""
    return "cudnn", f"flash attention, O(T) memory{mask}; bit for bit with train.deterministic=True"


def fallback_warnings(
    config: ModelConfig, kernel: str, reason: str, capability: float
) -> list[str]:
    """Return a warning if the NVIDIA GPU supports cuDNN attention but this run cannot use it."""
    if kernel == "cudnn" or config.attention != "auto" or capability < 8:
        return []
    return [f"attention runs without cuDNN, in O(T^2) memory and slower: {reason}"]


def make_attention(kernel: str, config: ModelConfig, deterministic: bool = False) -> Attention:
    """Return the attention function for a kernel name from `choose_attention`.

    Args:
        deterministic: train.deterministic.
    """
    if kernel == "cudnn":
        scales = distinct_scales(config.head_size) if deterministic else None
        return functools.partial(cudnn_attention, window=config.sliding_window, scales=scales)
    return functools.partial(causal_attention, dropout=config.dropout, window=config.sliding_window)


def causal_attention(
    q_BTHK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGK: jax.Array,
    keys_BH: jax.Array | None = None,
    starts_BT: jax.Array | None = None,
    dropout: float = 0.0,
    window: int | None = None,
) -> jax.Array:
    """Compute attention in a few blocks of queries, and skip the keys after each block's end.

    n blocks compute (n + 1) / 2n of the T x T scores, or less with a window. Which attention
    weights are dropped depends on the blocks. The blocks save 6 % of a `shakespeare_char` step on a
    CPU.
    """
    T = q_BTHK.shape[1]
    n = max(1, min(2, T // LEAST_POSITIONS_OF_TWO), min(MOST_BLOCKS, T // LEAST_POSITIONS))
    cuts = [T * i // n for i in range(1, n)]
    offsets = [0, *cuts]
    q_blocks, k_blocks, v_blocks = (jnp.split(x, cuts, axis=1) for x in (q_BTHK, k_BTGK, v_BTGK))
    starts = [None] * n if starts_BT is None else jnp.split(starts_BT, cuts, axis=1)
    out = []
    for i, (offset, q_BtHK) in enumerate(zip(offsets, q_blocks, strict=True)):
        oldest = 0 if window is None else max(0, offset - window + 1)
        first = max(j for j in range(i + 1) if offsets[j] <= oldest)  # first visible block of keys
        k_BsGK, v_BsGK = (jnp.concatenate(x[first : i + 1], axis=1) for x in (k_blocks, v_blocks))
        out.append(
            xla_attention(
                q_BtHK,
                k_BsGK,
                v_BsGK,
                keys_BH,
                starts[i],
                dropout=dropout,
                window=window,
                position_offset=offset,
                key_positions_S=offsets[first] + jnp.arange(k_BsGK.shape[1]),
            )
        )
    return jnp.concatenate(out, axis=1)


def xla_attention(
    q_BTHK: jax.Array,
    k_BSGK: jax.Array,
    v_BSGK: jax.Array,
    keys_BH: jax.Array | None = None,
    starts_BT: jax.Array | None = None,
    *,
    dropout: float = 0.0,
    window: int | None = None,
    position_offset: int | jax.Array = 0,
    key_positions_S: jax.Array | None = None,
) -> jax.Array:
    """Return softmax(q k^T / sqrt(K)) v with a causal mask, in q's dtype; the softmax is float32.

    Args:
        dropout: rate at which attention weights are dropped if `keys_BH` is given.
        window: number of positions that a query attends to, including its own.
        position_offset: position of the first query.
        key_positions_S: positions of the keys; None means 0, 1, ...
    """
    T, H, K = q_BTHK.shape[1:]
    k_BSHK = repeat_heads(k_BSGK, H)
    if q_BTHK.dtype == jnp.float32:
        scores_BHTS = inner_products(q_BTHK * K**-0.5, k_BSHK)
    else:  # scaling the queries first would round them
        scores_BHTS = inner_products(q_BTHK, k_BSHK) * K**-0.5
    if key_positions_S is None:
        key_positions_S = jnp.arange(k_BSGK.shape[1])
    is_seen = visible_keys(position_offset + jnp.arange(T), key_positions_S, window, starts_BT)
    weights_BHTS = jax.nn.softmax(jnp.where(is_seen, scores_BHTS, -jnp.inf), axis=-1)
    if keys_BH is not None and dropout > 0:

        def drop(weights_TS: jax.Array, key: jax.Array) -> jax.Array:
            return drop_elements(weights_TS, dropout, jax.random.fold_in(key, position_offset))

        weights_BHTS = jax.vmap(jax.vmap(drop))(weights_BHTS, keys_BH)
    v_BSHK = repeat_heads(v_BSGK, H)
    return jnp.einsum("BHTS,BSHK->BTHK", weights_BHTS.astype(v_BSHK.dtype), v_BSHK)


@jax.custom_vjp
def inner_products(q_BTHK: jax.Array, k_BSHK: jax.Array) -> jax.Array:
    """Return q k^T for each head in float32, with gradients computed in the operands' dtype.

    From bfloat16 operands, JAX would derive gradients that are float32 products. On an H100, a step
    of `gpt2` with model.attention=xla would then move 7 % more bytes.
    """
    return jnp.einsum("BTHK,BSHK->BHTS", q_BTHK, k_BSHK, preferred_element_type=jnp.float32)


def _inner_products_forward(
    q_BTHK: jax.Array, k_BSHK: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return inner_products(q_BTHK, k_BSHK), (q_BTHK, k_BSHK)


def _inner_products_backward(
    operands: tuple[jax.Array, jax.Array], d_BHTS: jax.Array
) -> tuple[jax.Array, jax.Array]:
    q_BTHK, k_BSHK = operands
    d_BHTS = d_BHTS.astype(q_BTHK.dtype)
    dq_BTHK = jnp.einsum("BHTS,BSHK->BTHK", d_BHTS, k_BSHK)
    return dq_BTHK, jnp.einsum("BHTS,BTHK->BSHK", d_BHTS, q_BTHK)


inner_products.defvjp(_inner_products_forward, _inner_products_backward)


def visible_keys(
    positions_T: jax.Array,
    key_positions_S: jax.Array,
    window: int | None,
    starts_BT: jax.Array | None,
) -> jax.Array:
    """Return which keys each query attends to: booleans (T, S), or (B, 1, T, S) with documents."""
    is_seen = positions_T[:, None] >= key_positions_S[None, :]
    if window is not None:
        is_seen &= positions_T[:, None] - key_positions_S[None, :] < window
    if starts_BT is not None:
        is_seen = is_seen & (key_positions_S >= starts_BT[:, None, :, None])
    return is_seen


def document_starts(tokens_BT: jax.Array, end_of_text: int) -> jax.Array:
    """Return starts_BT: the position in the row at which each token's document begins.

    A document ends with its end-of-text token. The first document of a row begins at 0.
    """
    is_end_BT = tokens_BT[:, :-1] == end_of_text
    begins_BT = jnp.where(is_end_BT, jnp.arange(1, tokens_BT.shape[1]), 0)
    return jax.lax.cummax(jnp.pad(begins_BT, ((0, 0), (1, 0))), axis=1)


def repeat_heads(x_BSGK: jax.Array, H: int) -> jax.Array:
    """Return x_BSHK: the keys or values of G heads, repeated for the H query heads."""
    G = x_BSGK.shape[2]
    return x_BSGK if G == H else jnp.repeat(x_BSGK, H // G, axis=2)


def distinct_scales(head_size: int) -> Iterator[float]:
    """Yield 1 / sqrt(head_size) repeatedly, as values that differ, but are equal in float32.

    With deterministic kernels, XLA handles only one of several identical calls, such as those of
    the layers (github.com/openxla/xla/pull/46500). Calls with distinct scales are all handled.
    """
    return (head_size**-0.5 * (1 + n * 2**-40) for n in itertools.count())


def cudnn_attention(
    q_BTHK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGK: jax.Array,
    keys_BH: jax.Array | None,
    starts_BT: jax.Array | None = None,
    window: int | None = None,
    scales: Iterator[float] | None = None,
) -> jax.Array:
    """Compute attention with cuDNN's fused flash kernel, which never stores the scores.

    With documents, the kernel takes one mask for all heads.
    """
    del keys_BH  # choose_attention never picks this kernel with dropout
    attend = functools.partial(
        jax.nn.dot_product_attention,
        q_BTHK,
        k_BTGK,
        v_BTGK,
        scale=None if scales is None else next(scales),
        implementation="cudnn",
    )
    if starts_BT is not None:
        positions_T = jnp.arange(q_BTHK.shape[1])
        return attend(mask=visible_keys(positions_T, positions_T, window, starts_BT))
    return attend(is_causal=True, local_window_size=None if window is None else (window - 1, 0))


def blockwise_attention(
    q_BTHK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGK: jax.Array,
    keys_BH: jax.Array | None,
    starts_BT: jax.Array | None = None,
    window: int | None = None,
) -> jax.Array:
    """Compute attention one block of queries at a time, in O(T) memory.

    `jaxgpt.plan` uses it in place of cuDNN's kernel when it compiles without an NVIDIA GPU.
    """
    del keys_BH
    B, T, H, K = q_BTHK.shape
    size = math.gcd(T, BLOCK)
    starts_BT = jnp.zeros((B, T), jnp.int32) if starts_BT is None else starts_BT

    @jax.checkpoint
    def attend(_, block):
        q_BtHK, starts_Bt, offset = block
        return None, xla_attention(
            q_BtHK, k_BTGK, v_BTGK, None, starts_Bt, window=window, position_offset=offset
        )

    def blocks(x: jax.Array) -> jax.Array:
        return x.reshape(B, T // size, size, *x.shape[2:]).swapaxes(0, 1)

    operands = blocks(q_BTHK), blocks(starts_BT), jnp.arange(0, T, size)
    _, out = jax.lax.scan(attend, None, operands)
    return out.swapaxes(0, 1).reshape(B, T, H, K)


def without_scores(attend: Attention) -> Attention:
    """Return attention that recomputes its T x T scores in the backward pass.

    This is the selective recomputation of arXiv 2205.05198, section 5.
    """

    @jax.custom_vjp
    def forgetful(q_BTHK, k_BTGK, v_BTGK, keys_BH, starts_BT):
        return attend(q_BTHK, k_BTGK, v_BTGK, keys_BH, starts_BT)

    def forward(*operands):
        return attend(*operands), operands

    def backward(operands, d_out_BTHK):
        # Without the barrier, XLA would recompute the scores too early and keep them in memory.
        operands, d_out_BTHK = jax.lax.optimization_barrier((operands, d_out_BTHK))
        *qkv, keys_BH, starts_BT = operands
        d_qkv = jax.vjp(lambda *qkv: attend(*qkv, keys_BH, starts_BT), *qkv)[1](d_out_BTHK)
        return *d_qkv, None, None

    forgetful.defvjp(forward, backward)
    return forgetful
