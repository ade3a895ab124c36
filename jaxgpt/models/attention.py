"""Causal self-attention kernels, and the choice of a kernel."""

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxgpt.config import ModelConfig, UsageError
from jaxgpt.kernels.dropout import drop_elements

# `causal_attention` splits the queries into two blocks if T >= 64, and into three or four blocks if
# each has at least 128 queries. On CPUs, more or shorter blocks would be slower.
MAX_BLOCKS, MIN_QUERIES, MIN_QUERIES_OF_TWO = 4, 128, 32
BLOCK = 128  # number of queries that `blockwise_attention` processes at a time
# At this block size and above, `blockwise_attention` is faster on CPUs than `causal_attention`. At
# T = 1,024, 2,048 and 4,096, `blockwise_attention` takes 0.99, 0.93 and 0.62 times as long, and
# uses 1/2, 1/4 and 1/8 of the memory (November 2026, two cores of an AMD EPYC, float32, JAX
# 0.10.2).
MIN_BLOCKWISE_T = 2048
# Older versions of JAX store the gradient of cuDNN attention's mask, with shape (B, H, T, T).
MASK_VERSION = (0, 11, 2)
# Above this block size, a document mask for cuDNN takes more than 512 MiB per row, so `auto` skips
# cuDNN.
MAX_MASKED_T = 16384


class TokenPositions(NamedTuple):
    """Positions and document numbers of tokens."""

    positions: jax.Array
    """int32 (T,) if equal in all rows, else (B, T), which requires `segments`.

    Only differences within a document matter.
    """

    segments: jax.Array | None = None
    """A number that identifies each token's document in its row, int32 (B, T).

    None means one document per row.
    """

    def block(self, part: slice) -> "TokenPositions":
        """Return the positions and segments of a slice of the tokens."""
        return jax.tree.map(lambda x: x[..., part], self)


# (q_BTHK, k_BSGK, v_BSGK, query positions, key positions, window, dropout keys_BH or None) ->
# out_BTHK. Query head h uses key-value head h G // H. A query attends to the keys of its document
# up to its own position, or only to the last `window` of these keys. All kernels except
# `xla_attention` and `_scanned_attention` assume that queries and keys belong to the same tokens,
# in the same order.
Attention = Callable[
    [jax.Array, jax.Array, jax.Array, TokenPositions, TokenPositions, int | None, jax.Array | None],
    jax.Array,
]


def cuda_capability(device: jax.Device) -> float:
    """Return the compute capability of an NVIDIA GPU, such as 9.0. For other devices, return 0."""
    try:
        return float(getattr(device, "compute_capability", 0))
    except ValueError:  # AMD GPUs report a name, such as gfx90a
        return 0.0


class AttentionSetting(NamedTuple):
    """Settings that determine which attention kernels can run, and how they are built."""

    config: ModelConfig
    dtype: str  # train.dtype
    platform: str = "cpu"  # `jax.Device.platform` of the devices
    capability: float = 0.0  # `cuda_capability` of the devices
    document_mask: bool = False  # data.document_mask
    deterministic: bool = False  # train.deterministic


class Kernel(NamedTuple):
    """An entry of `KERNELS`, the table of attention kernels."""

    obstacle: Callable[[AttentionSetting], str | None]  # why the kernel cannot run; None if it can
    make: Callable[[AttentionSetting], Attention]
    reason: str  # the kernel's advantage, for the log line
    min_T: int = 0  # `auto` skips it below this block size, except on GPUs with a document mask
    max_masked_T: float = math.inf  # with a document mask, `auto` skips it above this block size
    stores_scores: bool = False  # whether the kernel keeps T x T scores in memory
    stand_in: Callable[[], Attention] | None = None
    """Make a kernel that needs about as much memory and that `jaxgpt.plan` can compile on a CPU.

    If None, `jaxgpt.plan` compiles this kernel."""


def _cudnn_obstacle(setting: AttentionSetting) -> str | None:
    """Return the reason why the cuDNN kernel cannot run, or None if it can."""
    config, K = setting.config, setting.config.head_size
    largest = 256 if setting.capability >= 9 else 128  # maximum; Hopper supports larger heads
    if setting.platform != "gpu" or setting.capability < 8:
        return "cuDNN attention needs an NVIDIA GPU, A100 or newer"
    if setting.dtype not in ("bfloat16", "float16"):
        return f"cuDNN needs train.dtype=bfloat16, not {setting.dtype}"
    if K % 8 or K > largest:
        return f"cuDNN needs a head size that is a multiple of 8 up to {largest}, not {K}"
    if config.dropout:
        return f"the cuDNN kernel does not support dropout, and model.dropout={config.dropout}"
    if setting.document_mask and config.block_size % 2:
        return (
            f"cuDNN needs an even model.block_size for data.document_mask, not {config.block_size}"
        )
    if setting.document_mask and jax.__version_info__ < MASK_VERSION:
        oldest = ".".join(map(str, MASK_VERSION))
        return (
            f"cuDNN needs JAX {oldest} or newer for data.document_mask, because JAX "
            f"{jax.__version__} would store T x T gradients of the mask for each row and head"
        )
    return None


def _make_cudnn(setting: AttentionSetting) -> Attention:
    """Return the cuDNN kernel, with `_distinct_scales` if train.deterministic=True."""
    scales = _distinct_scales(setting.config.head_size) if setting.deterministic else None
    return functools.partial(_cudnn_attention, scales=scales)


# model.attention -> kernel. `auto` picks the first kernel that can run and is allowed for the block
# size.
KERNELS = {
    "cudnn": Kernel(
        _cudnn_obstacle,
        _make_cudnn,
        "flash attention, O(T) memory; bitwise reproducible with train.deterministic=True",
        max_masked_T=MAX_MASKED_T,
        stand_in=lambda: without_scores(blockwise_attention),
    ),
    "blockwise": Kernel(
        lambda setting: None,
        lambda setting: functools.partial(blockwise_attention, dropout=setting.config.dropout),
        "one block of queries at a time, O(T) memory",
        min_T=MIN_BLOCKWISE_T,
    ),
    "xla": Kernel(
        lambda setting: None,
        lambda setting: functools.partial(causal_attention, dropout=setting.config.dropout),
        "all scores at once, O(T^2) memory",
        stores_scores=True,
    ),
}


def choose_attention(setting: AttentionSetting) -> tuple[str, str]:
    """Return the name of the kernel to run, and the reason for the choice.

    Ring attention uses its own kernel instead.

    Raises:
        UsageError: if model.attention names a kernel that is unknown or cannot run.
    """
    chosen = setting.config.attention
    if chosen != "auto":
        if obstacle := _kernel(chosen).obstacle(setting):
            raise UsageError(f"model.attention={chosen}: {obstacle}; use auto")
        return chosen, f"model.attention={chosen}"
    name, names = _first_kernel(setting), list(KERNELS)
    before = [KERNELS[other].obstacle(setting) for other in names[: names.index(name)]]
    obstacles = [why for why in before if why is not None]
    mask = "a document mask of 2 T^2 bytes per row" if setting.document_mask else ""
    reason = KERNELS[name].reason
    if mask and name == "cudnn":
        reason += f", plus {mask}"
    elif mask and KERNELS["cudnn"].obstacle(setting) is None:
        obstacles.append(f"cuDNN would need {mask}; model.attention=cudnn selects it")
    return name, "; ".join([reason, *obstacles])


def _kernel(name: str) -> Kernel:
    if name not in KERNELS:
        raise UsageError(f"model.attention={name}: must be one of auto, {', '.join(KERNELS)}")
    return KERNELS[name]


def _first_kernel(setting: AttentionSetting) -> str:
    T, is_masked = setting.config.block_size, setting.document_mask

    def suits(kernel: Kernel) -> bool:
        # On GPUs, `xla` stores the scores of all layers; see models/README.md.
        is_long = T >= kernel.min_T or (is_masked and setting.platform == "gpu")
        return is_long and (not is_masked or T <= kernel.max_masked_T)

    return next(
        name
        for name, kernel in KERNELS.items()
        if kernel.obstacle(setting) is None and suits(kernel)
    )


def stores_scores(config: ModelConfig) -> bool:
    """Return `Kernel.stores_scores` for the kernel selected by model.attention.

    For model.attention=auto, this assumes a CPU and no document mask.

    Raises:
        UsageError: if model.attention names an unknown kernel.
    """
    name = config.attention
    if name == "auto":
        name = _first_kernel(AttentionSetting(config, "float32"))
    return _kernel(name).stores_scores


def fallback_warnings(setting: AttentionSetting, kernel: str, reason: str) -> list[str]:
    """Return a warning if `auto` chooses a slower kernel on a GPU that supports cuDNN attention.

    The kernels after `cudnn` in `KERNELS` are slower. `choose_attention` returns `kernel` and
    `reason`.

    Returns:
        A list with the warning, or an empty list.
    """
    names = list(KERNELS)
    is_as_fast = names.index(kernel) <= names.index("cudnn")
    if is_as_fast or setting.config.attention != "auto" or setting.capability < 8:
        return []
    return [f"attention runs without cuDNN, which is slower: {reason}"]


def causal_attention(
    q_BTHK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGK: jax.Array,
    q_at: TokenPositions,
    k_at: TokenPositions,
    window: int | None,
    keys_BH: jax.Array | None,
    dropout: float = 0.0,
    attend: Callable[..., jax.Array] | None = None,
) -> jax.Array:
    """Compute attention in up to four blocks of queries, skipping the keys after each block.

    Queries and keys must belong to the same tokens, in the same order. With n blocks, only about
    (n + 1) / 2n of the T x T scores are computed, or fewer with a short window. This saves 6% of a
    `shakespeare_char` step on a CPU. Dropout masks depend on the block boundaries.

    Args:
        dropout: dropout rate of the attention weights; ignored if `keys_BH` is None.
        attend: function that computes the attention of one block, by default `xla_attention`.

    Returns:
        out_BTHK; see `Attention`.
    """
    T = q_BTHK.shape[1]
    n = max(1, min(2, T // MIN_QUERIES_OF_TWO), min(MAX_BLOCKS, T // MIN_QUERIES))
    cuts = [T * i // n for i in range(1, n)]
    offsets, ends = [0, *cuts], [*cuts, T]
    q_blocks, k_blocks, v_blocks = (jnp.split(x, cuts, axis=1) for x in (q_BTHK, k_BTGK, v_BTGK))
    out = []
    for i, (offset, end) in enumerate(zip(offsets, ends, strict=True)):
        oldest = 0 if window is None else max(0, offset - window + 1)
        first = max(j for j in range(i + 1) if offsets[j] <= oldest)  # first visible block of keys
        k_BsGK, v_BsGK = (jnp.concatenate(x[first : i + 1], axis=1) for x in (k_blocks, v_blocks))
        out.append(
            (attend or xla_attention)(
                q_blocks[i],
                k_BsGK,
                v_BsGK,
                q_at.block(slice(offset, end)),
                k_at.block(slice(offsets[first], end)),
                window,
                keys_BH,
                dropout=dropout,
                block=offset,
            )
        )
    return jnp.concatenate(out, axis=1)


def xla_attention(
    q_BTHK: jax.Array,
    k_BSGK: jax.Array,
    v_BSGK: jax.Array,
    q_at: TokenPositions,
    k_at: TokenPositions,
    window: int | None = None,
    keys_BH: jax.Array | None = None,
    *,
    dropout: float = 0.0,
    block: int | jax.Array = 0,
) -> jax.Array:
    """Return out_BTHK = softmax(q k^T / sqrt(K)) v, with the mask that `visible_keys` returns.

    H must be a multiple of G, and each query must see at least one key. The softmax is computed in
    float32 (float64 for float64 operands). The result has v's dtype.

    Args:
        keys_BH: a dropout key for each row and head; None disables dropout.
        dropout: dropout rate of the attention weights; ignored if `keys_BH` is None.
        block: number of the query block. Blocks with equal `keys_BH` need different numbers, so
            that their dropout masks differ.
    """
    H, K = q_BTHK.shape[2:]
    k_BSHK = _repeat_heads(k_BSGK, H)
    if q_BTHK.dtype == jnp.float32:
        scores_BHTS = inner_products(q_BTHK * K**-0.5, k_BSHK)
    else:  # scaling the queries first would round them once more
        scores_BHTS = inner_products(q_BTHK, k_BSHK) * K**-0.5
    is_seen = visible_keys(q_at, k_at, window)
    weights_BHTS = jax.nn.softmax(jnp.where(is_seen, scores_BHTS, -jnp.inf), axis=-1)
    if keys_BH is not None and dropout > 0:

        def drop(weights_TS: jax.Array, key: jax.Array) -> jax.Array:
            return drop_elements(weights_TS, dropout, jax.random.fold_in(key, block))

        weights_BHTS = jax.vmap(jax.vmap(drop))(weights_BHTS, keys_BH)
    v_BSHK = _repeat_heads(v_BSGK, H)
    return jnp.einsum("BHTS,BSHK->BTHK", weights_BHTS.astype(v_BSHK.dtype), v_BSHK)


@jax.custom_vjp
def inner_products(q_BTHK: jax.Array, k_BSHK: jax.Array) -> jax.Array:
    """Return scores_BHTS = q k^T, with gradients computed in the operands' dtype.

    The scores are in float32 (float64 for float64 operands).

    For bfloat16 operands, JAX's own gradient would use float32 matmuls. A step of `gpt2` with
    model.attention=xla would then move 7% more bytes on an H100.
    """
    dtype = jnp.promote_types(q_BTHK.dtype, jnp.float32)  # float64 for float64 operands
    return jnp.einsum("BTHK,BSHK->BHTS", q_BTHK, k_BSHK, preferred_element_type=dtype)


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


def visible_keys(q_at: TokenPositions, k_at: TokenPositions, window: int | None) -> jax.Array:
    """Return the attention mask: bool (T, S), or (B, 1, T, S) with a document mask.

    A query sees a key if the key is not later, belongs to the same segment (with a document mask),
    and is fewer than `window` positions away (unless `window` is None).
    """
    distance = q_at.positions[..., :, None] - k_at.positions[..., None, :]
    is_seen = distance >= 0
    if window is not None:
        is_seen &= distance < window
    if q_at.segments is not None:
        is_seen &= q_at.segments[:, :, None] == k_at.segments[:, None, :]
        is_seen = is_seen[:, None]
    return is_seen


def _repeat_heads(x_BSGK: jax.Array, H: int) -> jax.Array:
    """Return x_BSHK, where each of the G heads is repeated for H / G query heads."""
    G = x_BSGK.shape[2]
    return x_BSGK if G == H else jnp.repeat(x_BSGK, H // G, axis=2)


def _distinct_scales(head_size: int) -> Iterator[float]:
    """Yield distinct Python floats that round to the same float32, 1 / sqrt(head_size).

    This holds for the first 20,000 floats and for every head size that cuDNN supports.

    XLA handles only one of several identical calls to the deterministic kernel, such as those in
    different layers (github.com/openxla/xla/pull/46500). Different scales make the calls distinct.
    """
    return (head_size**-0.5 * (1 + n * 2**-40) for n in itertools.count())


def _cudnn_attention(
    q_BTHK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGK: jax.Array,
    q_at: TokenPositions,
    k_at: TokenPositions,
    window: int | None,
    keys_BH: jax.Array | None,
    scales: Iterator[float] | None = None,
) -> jax.Array:
    """Compute attention with cuDNN's flash attention kernel, which never stores the scores.

    Queries and keys must belong to the same tokens, in the same order. With a document mask, all
    heads share one mask of shape (B, 1, T, S).

    Args:
        keys_BH: ignored, because the kernel does not support dropout.
        scales: iterator over factors for the scores, one for each call. None means 1 / sqrt(K).

    Returns:
        out_BTHK; see `Attention`.
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
    if q_at.segments is not None:
        return attend(mask=visible_keys(q_at, k_at, window))
    return attend(is_causal=True, local_window_size=None if window is None else (window - 1, 0))


def blockwise_attention(*operands: Any, dropout: float = 0.0) -> jax.Array:
    """Compute `causal_attention` with a loop over the queries, usually in O(T) memory.

    The backward pass recomputes the scores. A block of `causal_attention` takes O(T^2) memory if
    its length has no suitable divisor (see `_scanned_attention`).

    Args:
        operands: the arguments of an `Attention` function.
        dropout: dropout rate of the attention weights; ignored if `keys_BH` is None.
    """
    return causal_attention(*operands, dropout=dropout, attend=_scanned_attention)


def _scanned_attention(
    q_BTHK: jax.Array,
    k_BSGK: jax.Array,
    v_BSGK: jax.Array,
    q_at: TokenPositions,
    k_at: TokenPositions,
    window: int | None,
    keys_BH: jax.Array | None,
    *,
    dropout: float,
    block: int,
) -> jax.Array:
    """Compute `xla_attention` in a loop over blocks of at most `BLOCK` queries.

    If T has no divisor from BLOCK / 8 to BLOCK, all queries are processed at once.
    """
    T = q_BTHK.shape[1]
    size = max(n for n in range(1, BLOCK + 1) if T % n == 0)
    size = size if size >= BLOCK / 8 else T  # many short blocks would be slow

    @jax.checkpoint
    def attend(_, part):
        q_BtHK, at, number = part
        operands = q_BtHK, k_BSGK, v_BSGK, at, k_at, window, keys_BH
        return None, xla_attention(*operands, dropout=dropout, block=number)

    def split(x: jax.Array, axis: int) -> jax.Array:
        shape = *x.shape[:axis], T // size, size, *x.shape[axis + 1 :]
        return jnp.moveaxis(x.reshape(shape), axis, 0)

    places = jax.tree.map(lambda x: split(x, x.ndim - 1), q_at)
    operands = split(q_BTHK, 1), places, block + jnp.arange(0, T, size)
    _, out = jax.lax.scan(attend, None, operands)
    return jnp.moveaxis(out, 0, 1).reshape(q_BTHK.shape)


def without_scores(attend: Attention) -> Attention:
    """Return `attend` with a backward pass that recomputes the T x T scores.

    This is the selective activation recomputation of arXiv 2205.05198, section 5.
    """

    @functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
    def recomputed(q_BTHK, k_BSGK, v_BSGK, q_at, k_at, window, keys_BH):
        return attend(q_BTHK, k_BSGK, v_BSGK, q_at, k_at, window, keys_BH)

    def forward(q_BTHK, k_BSGK, v_BSGK, q_at, k_at, window, keys_BH):
        out_BTHK = attend(q_BTHK, k_BSGK, v_BSGK, q_at, k_at, window, keys_BH)
        return out_BTHK, ((q_BTHK, k_BSGK, v_BSGK), (q_at, k_at, keys_BH))

    def backward(window, operands, d_out_BTHK):
        # Without the barrier, XLA would recompute the scores too early and keep them in memory.
        operands, d_out_BTHK = jax.lax.optimization_barrier((operands, d_out_BTHK))
        qkv, (q_at, k_at, keys_BH) = operands
        _, pull_back = jax.vjp(lambda *qkv: attend(*qkv, q_at, k_at, window, keys_BH), *qkv)
        return *pull_back(d_out_BTHK), None, None, None

    recomputed.defvjp(forward, backward)
    return recomputed
