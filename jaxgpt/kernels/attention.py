"""Causal self-attention kernels, and the token positions and masks that they share.

`models.attention` has the table of kernels and chooses among them.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxgpt.kernels.dropout import drop_elements

# `causal_attention` splits the queries into two blocks if T >= 64, and into three or four blocks if
# each has at least 128 queries. On CPUs, more or shorter blocks would be slower.
MAX_BLOCKS, MIN_QUERIES, MIN_QUERIES_OF_TWO = 4, 128, 32
QUERY_BLOCK = 128  # maximum number of queries that a loop over queries processes at a time


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


def distinct_scales(head_size: int) -> Iterator[float]:
    """Yield distinct Python floats that round to the same float32, 1 / sqrt(head_size).

    This holds for the first 20,000 floats and for every head size that cuDNN supports.

    XLA handles only one of several identical calls to the deterministic kernel, such as those in
    different layers (github.com/openxla/xla/pull/46500). Different scales make the calls distinct.
    """
    return (head_size**-0.5 * (1 + n * 2**-40) for n in itertools.count())


def cudnn_attention(
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
    its length has no suitable divisor (see `query_block_size`).

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
    """Compute `xla_attention` in a loop over blocks of `query_block_size(T)` queries."""
    T = q_BTHK.shape[1]
    size = query_block_size(T)

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


def query_block_size(n: int) -> int:
    """Return how many of n queries a loop processes at a time.

    This is the largest divisor of n up to `QUERY_BLOCK`, or n if that divisor is less than
    QUERY_BLOCK / 8, because many short blocks would be slow.
    """
    size = max(d for d in range(1, QUERY_BLOCK + 1) if n % d == 0)
    return size if size >= QUERY_BLOCK / 8 else n


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
