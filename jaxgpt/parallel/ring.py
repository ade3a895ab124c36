"""Ring attention (arXiv 2310.01889), for rows in the zigzag layout of `parallel.context`.

Each device attends to one block of keys and values while it sends the block to the next device.
Layers with a short window do not use the ring. Instead, each chunk fetches the keys in its window
from the chunks before it.

The first half of a device's tokens is its early chunk, and the second half is its late chunk.
Everything here runs inside `jax.shard_map`. The argument `axes` holds the mesh axes that split the
sequence.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxgpt.kernels.attention import TokenPositions, query_block_size, visible_keys

Axes = tuple[str, ...]  # mesh axes that split the sequence, outermost first
OUTSIDE = jnp.iinfo(jnp.int32).max  # a position that no query sees


class Queries(NamedTuple):
    """Queries, and arrays that the backward pass needs for these queries.

    Query heads that share a key-value head are interleaved along T: a token's queries are adjacent.
    """

    q_BTGK: jax.Array
    at: TokenPositions
    d_out_BTGK: jax.Array | None = None  # gradient of the output
    lse_BTG: jax.Array | None = None  # log-sum-exp of the scores over all visible keys
    delta_BTG: jax.Array | None = None  # inner product of the output and its gradient


class Keys(NamedTuple):
    """A block of keys and values."""

    k_BSGK: jax.Array
    v_BSGK: jax.Array
    at: TokenPositions


class Pair(NamedTuple):
    """A range of queries, and the range of keys that they may see."""

    first_query: int | jax.Array
    n_queries: int
    first_key: int | jax.Array
    n_keys: int
    n_before: int | None = None
    """If not None, a query sees its own key and at most `n_before` earlier keys. In this
    case, the keys must belong to the queries' tokens and to the `n_before` preceding tokens."""


def ring_attention(
    axes: Axes,
    q_BTHK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGK: jax.Array,
    q_at: TokenPositions,
    k_at: TokenPositions,
    window: int | None,
    keys_BH: jax.Array | None,
) -> jax.Array:
    """Compute attention without dropout, for rows in the zigzag layout.

    With n devices and T tokens per device, layers with a window of at most (n - 1) T / 2 + 1 tokens
    fetch only the keys in their windows. Other layers send all keys and values around the ring.

    Args:
        q_BTHK, k_BTGK, v_BTGK: this device's slice of the rows.
        q_at, k_at: positions of whole rows.
        keys_BH: ignored.

    Returns:
        out_BTHK for this device's slice of the rows; see `kernels.attention.Attention`.
    """
    del keys_BH  # `ring_obstacle` excludes dropout
    B, T, H, K = q_BTHK.shape
    G = k_BTGK.shape[2]
    R = H // G  # query heads with the same key-value head become queries with the same position
    q_BTGK = q_BTHK.reshape(B, T, G, R, K).swapaxes(2, 3).reshape(B, T * R, G, K)
    own_at = _slice_of(q_at, axes, jax.lax.axis_index(axes))
    q_at = jax.tree.map(lambda x: x.repeat(R, axis=-1), own_at)
    if window is not None and window <= (jax.lax.axis_size(axes) - 1) * T // 2 + 1:
        out_BTGK = _attend_to_window(axes, window, q_BTGK, k_BTGK, v_BTGK, q_at, k_at)
    else:
        out_BTGK = _attend_around_ring(axes, window, q_BTGK, k_BTGK, v_BTGK, q_at, k_at)
    return out_BTGK.reshape(B, T, R, G, K).swapaxes(2, 3).reshape(B, T, H, K)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend_around_ring(axes, window, q_BTGK, k_BTGK, v_BTGK, q_at, k_at):
    return _ring_forward(axes, window, q_BTGK, k_BTGK, v_BTGK, q_at, k_at)[0]


def _ring_forward(axes, window, q_BTGK, k_BTGK, v_BTGK, q_at, k_at):
    queries = Queries(q_BTGK, q_at)

    def attend(step: int, keys: Keys, pairs: Any, found: Any) -> Any:
        for chunks in pairs:
            pair = _pair_of_chunks(queries, keys, *chunks)
            found = attend_block(window, queries, keys, pair, found)
        return found

    found = _nothing_seen(queries)
    out_BTGK, lse_BTG = _around_ring(axes, attend, k_BTGK, v_BTGK, k_at, found)
    out_BTGK = out_BTGK.astype(q_BTGK.dtype)
    return out_BTGK, (q_BTGK, k_BTGK, v_BTGK, q_at, k_at, out_BTGK, lse_BTG)


def _ring_backward(axes, window, saved, d_out_BTGK):
    # Without the barrier, XLA would store all blocks of all layers instead of sending them again.
    saved, d_out_BTGK = jax.lax.optimization_barrier((saved, d_out_BTGK))
    q_BTGK, k_BTGK, v_BTGK, q_at, k_at, out_BTGK, lse_BTG = saved
    delta_BTG = (d_out_BTGK.astype(lse_BTG.dtype) * out_BTGK).sum(axis=-1)
    queries = Queries(q_BTGK, q_at, d_out_BTGK, lse_BTG, delta_BTG)

    def add_gradients(step: int, keys: Keys, pairs: Any, found: Any) -> Any:
        # d_kvs: gradients of this device's block, and of the block that was processed last.
        dq_BTGK, d_kvs = found
        d_kv = _zeros(jnp.stack(keys[:2]), lse_BTG.dtype)
        for chunks in pairs:
            pair = _pair_of_chunks(queries, keys, *chunks)
            dq_BTGK, d_kv = block_gradients(window, queries, keys, pair, (dq_BTGK, d_kv))
        if step > 1:  # add this block's gradients from the previous device
            *d_kvs, travelling = d_kvs
            d_kv += _send_to_next(travelling, axes)
        return dq_BTGK, [*d_kvs, d_kv]

    found = _zeros(q_BTGK, lse_BTG.dtype), []
    dq_BTGK, (own, travelling) = _around_ring(axes, add_gradients, k_BTGK, v_BTGK, k_at, found)
    dk_BSGK, dv_BSGK = own + _send_to_next(travelling, axes)
    gradients = (x.astype(q_BTGK.dtype) for x in (dq_BTGK, dk_BSGK, dv_BSGK))
    return *gradients, None, None


_attend_around_ring.defvjp(_ring_forward, _ring_backward)


def _around_ring(
    axes: Axes,
    process: Callable[[int, Keys, list[tuple[Any, Any]], Any], Any],
    k_BTGK: jax.Array,
    v_BTGK: jax.Array,
    k_at: TokenPositions,
    found: Any,
) -> Any:
    """Apply `found = process(step, keys, visible_pairs, found)` to each block; return `found`.

    The first block belongs to this device. Each block is processed while it is sent to the
    next device.
    """
    n, i = jax.lax.axis_size(axes), jax.lax.axis_index(axes)
    kv = jnp.stack([k_BTGK, v_BTGK])
    for step in range(n):
        source = (i - step) % n
        following = _send_to_next(kv, axes) if step < n - 1 else kv
        keys = Keys(*kv, _slice_of(k_at, axes, source))
        found = process(step, keys, visible_pairs(step, i, source), found)
        # Without the barrier, XLA may process many blocks at once, which takes more memory.
        kv, found = jax.lax.optimization_barrier((following, found))
    return found


def visible_pairs(step: int, i: Any, source: Any) -> list[tuple[Any, Any]]:
    """Return the (query chunk, key chunk) pairs that a causal mask does not exclude.

    0 is a device's early chunk, and 1 is its late chunk. Every late chunk comes after all early
    chunks, and the late chunks are in reverse device order. In each step, all devices have the same
    number of pairs.

    Args:
        step: number of times that the keys have been sent to the next device.
        i: index of the device that holds the queries.
        source: index of the device that the keys came from.
    """
    if step == 0:
        return [(0, 0), (1, 1), (1, 0)]  # `_merge` needs a chunk's own keys first
    same = jnp.where(source < i, 0, 1)
    return [(1, 0), (same, same)]


def _pair_of_chunks(queries: Queries, keys: Keys, mine: Any, theirs: Any) -> Pair:
    n_queries, n_keys = queries.q_BTGK.shape[1] // 2, keys.k_BSGK.shape[1] // 2
    return Pair(mine * n_queries, n_queries, theirs * n_keys, n_keys)


def _send_to_next(x: jax.Array, axes: Axes) -> jax.Array:
    n = jax.lax.axis_size(axes)
    return jax.lax.ppermute(x, axes, [(i, (i + 1) % n) for i in range(n)])


def _merge(
    one: tuple[jax.Array, jax.Array], other: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Merge two results of `attend_block`. Each query must have seen at least one key."""
    (out, lse), (other_out, other_lse) = one, other
    total = jnp.logaddexp(lse, other_lse)
    shares = (jnp.exp(x - total)[..., None] for x in (lse, other_lse))
    return sum(share * x for share, x in zip(shares, (out, other_out), strict=True)), total


def _attend_to_window(axes, window, q_BTGK, k_BTGK, v_BTGK, q_at, k_at):
    """Let each chunk attend to its own keys and to the `window - 1` keys before them."""
    chunk, n_before = k_BTGK.shape[1] // 2, window - 1
    kv = jnp.stack([_halves(k_BTGK), _halves(v_BTGK)], axis=1)  # (2, 2, B, S, G, K)
    parts = [kv]
    for missing in range(n_before, 0, -chunk):
        kv = _from_chunk_before(kv[:, :, :, -min(chunk, missing) :], axes)
        parts.insert(0, kv)
    k_2BSGK, v_2BSGK = jnp.concatenate(parts, axis=3).swapaxes(0, 1)
    keys = Keys(k_2BSGK, v_2BSGK, _positions_around_chunks(k_at, n_before, axes))
    queries = Queries(_halves(q_BTGK), _halves_at(q_at))
    return _joined(jax.vmap(functools.partial(_attend_once, window))(queries, keys))


def _positions_around_chunks(at: TokenPositions, n_before: int, axes: Axes) -> TokenPositions:
    """Return token positions for each of this device's chunks and the `n_before` tokens before it.

    Args:
        at: the positions of the whole row, in the zigzag layout.
    """
    n, i = jax.lax.axis_size(axes), jax.lax.axis_index(axes)
    place_of = [2 * min(c, 2 * n - 1 - c) + (c >= n) for c in range(2 * n)]  # of chunk c

    def around(x: jax.Array) -> jax.Array:
        chunks = _parts(x, x.ndim - 1, 2 * n)[jnp.array(place_of)]
        row = jnp.moveaxis(chunks, 0, -2).reshape(x.shape)
        row = jnp.pad(row, [(0, 0)] * (x.ndim - 1) + [(n_before, 0)], constant_values=OUTSIDE)
        chunk = x.shape[-1] // (2 * n)
        take = functools.partial(jax.lax.dynamic_slice_in_dim, row, axis=-1)
        return jnp.stack([take(c * chunk, n_before + chunk) for c in (i, 2 * n - 1 - i)])

    return jax.tree.map(around, at)


def _from_chunk_before(x_2: jax.Array, axes: Axes) -> jax.Array:
    """Return the keys and values of the chunk before each of this device's two chunks.

    If there is no such chunk, return zeros.
    """
    n, i = jax.lax.axis_size(axes), jax.lax.axis_index(axes)
    early = jax.lax.ppermute(x_2[0], axes, [(d, d + 1) for d in range(n - 1)])
    late = jax.lax.ppermute(x_2[1], axes, [(d + 1, d) for d in range(n - 1)])
    return jnp.stack([early, jnp.where(i == n - 1, x_2[0], late)])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend_once(window, queries, keys):
    return _attend_once_forward(window, queries, keys)[0]


def _attend_once_forward(window, queries, keys):
    pair = Pair(0, queries.q_BTGK.shape[1], 0, keys.k_BSGK.shape[1], window - 1)
    out_BTGK, lse_BTG = attend_block(window, queries, keys, pair, _nothing_seen(queries))
    out_BTGK = out_BTGK.astype(queries.q_BTGK.dtype)
    return out_BTGK, (queries, keys, out_BTGK, lse_BTG)


def _attend_once_backward(window, saved, d_out_BTGK):
    queries, keys, out_BTGK, lse_BTG = saved
    delta_BTG = (d_out_BTGK.astype(lse_BTG.dtype) * out_BTGK).sum(axis=-1)
    queries = Queries(queries.q_BTGK, queries.at, d_out_BTGK, lse_BTG, delta_BTG)
    found = tuple(_zeros(x, lse_BTG.dtype) for x in (queries.q_BTGK, jnp.stack(keys[:2])))
    pair = Pair(0, queries.q_BTGK.shape[1], 0, keys.k_BSGK.shape[1], window - 1)
    dq_BTGK, d_kv = block_gradients(window, queries, keys, pair, found)
    dq_BTGK, dk_BSGK, dv_BSGK = (d.astype(d_out_BTGK.dtype) for d in (dq_BTGK, *d_kv))
    return Queries(dq_BTGK, None), Keys(dk_BSGK, dv_BSGK, None)


_attend_once.defvjp(_attend_once_forward, _attend_once_backward)


def _nothing_seen(queries: Queries) -> tuple[jax.Array, jax.Array]:
    """Return the `found` argument of `attend_block` for queries that have seen no keys."""
    out_BTGK = _zeros(queries.q_BTGK, _float32_or_64(queries.q_BTGK))
    return out_BTGK, jnp.full_like(out_BTGK[..., 0], -jnp.inf)


def _zeros(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Return zeros with the shape of `x`, or NaN if the first element of `x` is not finite.

    If the zeros did not depend on `x`, XLA's CPU backend would allocate them for all blocks of a
    layer before processing the first one.
    """
    return jnp.broadcast_to(0 * x[(0,) * x.ndim].astype(dtype), x.shape)


def attend_block(
    window: int | None,
    queries: Queries,
    keys: Keys,
    pair: Pair,
    found: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """Return `found`, merged with the attention output for one block of keys.

    `query_block_size(pair.n_queries)` queries are processed at a time.

    Args:
        window: see `visible_keys`.
        pair: the queries to update, and the keys that they may see. Each of these queries must see
            a key in this block or in an earlier block.
        found: the output out_BTGK for the earlier blocks, and the log-sum-exp lse_BTG of their
            scores, in float32 (float64 for float64 operands). Before the first block, out_BTGK
            is 0, and lse_BTG is -inf.
    """
    queries = _with_dependent_positions(queries)
    firsts, n_queries, n_keys = _split_pair(pair)

    def attend(found: Any, firsts: tuple[jax.Array, jax.Array]) -> tuple[Any, None]:
        part, seen = _slice(queries, firsts[0], n_queries), _slice(keys, firsts[1], n_keys)
        scores_BGTS, is_seen = _scores(window, part, seen)
        largest_BGT1 = jnp.where(is_seen, scores_BGTS, -jnp.inf).max(axis=-1, keepdims=True)
        largest_BGT1 = jnp.maximum(largest_BGT1, jnp.finfo(scores_BGTS.dtype).min)
        weights_BGTS = jnp.where(is_seen, jnp.exp(scores_BGTS - largest_BGT1), 0)
        sums_BTG = weights_BGTS.sum(axis=-1).swapaxes(1, 2)
        out_BTGK = _einsum("BGTS,BSGK->BTGK", weights_BGTS, seen.v_BSGK)
        out_BTGK /= jnp.where(sums_BTG == 0, 1, sums_BTG)[..., None]
        new = out_BTGK, jnp.log(sums_BTG) + largest_BGT1[..., 0].swapaxes(1, 2)
        before = tuple(_tokens(x, firsts[0], n_queries) for x in found)
        return _write(found, _merge(before, new), firsts[0]), None

    return jax.lax.scan(attend, found, firsts)[0]


def block_gradients(
    window: int | None,
    queries: Queries,
    keys: Keys,
    pair: Pair,
    found: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """Return `found` plus the gradients for one block of keys; see `attend_block`.

    `queries.lse_BTG` and `queries.delta_BTG` must be computed over all blocks. The sum of the
    blocks' gradients is then the full gradient (arXiv 2205.14135, appendix B.2).

    Args:
        found: gradients of the queries (B, T, G, K), and of the keys and values (2, B, S, G, K), in
            float32 (float64 for float64 operands).
    """
    queries = _with_dependent_positions(queries)
    firsts, n_queries, n_keys = _split_pair(pair)

    def add(found: Any, firsts: tuple[jax.Array, jax.Array]) -> tuple[Any, None]:
        part, seen = _slice(queries, firsts[0], n_queries), _slice(keys, firsts[1], n_keys)
        scores_BGTS, is_seen = _scores(window, part, seen)
        lse_BGT1, delta_BGT1 = (x.swapaxes(1, 2)[..., None] for x in (part.lse_BTG, part.delta_BTG))
        weights_BGTS = jnp.where(is_seen, jnp.exp(scores_BGTS - lse_BGT1), 0)
        d_weights_BGTS = _einsum("BTGK,BSGK->BGTS", part.d_out_BTGK, seen.v_BSGK)
        d_scores_BGTS = weights_BGTS * (d_weights_BGTS - delta_BGT1) * _scale(keys)
        dq_BTGK = _einsum("BGTS,BSGK->BTGK", d_scores_BGTS, seen.k_BSGK)
        dk_BSGK = _einsum("BGTS,BTGK->BSGK", d_scores_BGTS, part.q_BTGK)
        dv_BSGK = _einsum("BGTS,BTGK->BSGK", weights_BGTS, part.d_out_BTGK)
        dq, d_kv = found
        dq_BTGK += _tokens(dq, firsts[0], n_queries)
        new = jnp.stack([dk_BSGK, dv_BSGK]) + _tokens(d_kv, firsts[1], n_keys, axis=2)
        return (_write(dq, dq_BTGK, firsts[0]), _write(d_kv, new, firsts[1], axis=2)), None

    return jax.lax.scan(add, found, firsts)[0]


def _scores(window: int | None, queries: Queries, keys: Keys) -> tuple[jax.Array, jax.Array]:
    """Return scores_BGTS and the attention mask."""
    scores_BGTS = _einsum("BTGK,BSGK->BGTS", queries.q_BTGK, keys.k_BSGK) * _scale(keys)
    return scores_BGTS, visible_keys(queries.at, keys.at, window)


def _scale(keys: Keys) -> float:
    return keys.k_BSGK.shape[-1] ** -0.5


def _einsum(formula: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """Multiply in y's dtype and accumulate in float32 (float64 for float64 operands)."""
    dtype = _float32_or_64(y)
    return jnp.einsum(formula, x.astype(y.dtype), y, preferred_element_type=dtype)


def _float32_or_64(x: jax.Array) -> jnp.dtype:
    return jnp.promote_types(x.dtype, jnp.float32)


def _with_dependent_positions(queries: Queries) -> Queries:
    """Make the positions depend on the queries.

    Otherwise, the masks would not depend on differentiated values, and jax.checkpoint of a layer
    would keep the masks of all blocks.
    """
    return jax.lax.optimization_barrier(queries)


def _split_pair(pair: Pair) -> tuple[tuple[jax.Array, jax.Array], int, int]:
    """Split the queries of a pair into N equal parts; see `query_block_size`.

    Returns:
        Two int32 arrays (N,): the first query of each part, and the first key that the part may
        see. The number of queries per part, and the number of keys per part.
    """
    T, S = pair.n_queries, pair.n_keys
    size = query_block_size(T)
    starts_N, keys_N, n_keys = jnp.arange(0, T, size), jnp.zeros(T // size, jnp.int32), S
    if pair.n_before is not None:
        R = T // (S - pair.n_before)  # queries per token
        n_keys = min(S, pair.n_before + (size - 1) // R + 2)  # a token may span two parts
        keys_N = jnp.minimum(starts_N // R, S - n_keys)
    return (pair.first_query + starts_N, pair.first_key + keys_N), size, n_keys


def _slice(of_tokens: Any, first: jax.Array, size: int) -> Any:
    """Return `size` queries, or `size` keys and values, starting at index `first`."""
    at = jax.tree.map(lambda x: _tokens(x, first, size, axis=-1), of_tokens.at)
    arrays = jax.tree.map(lambda x: _tokens(x, first, size), of_tokens._replace(at=None))
    return arrays._replace(at=at)


def _tokens(x: jax.Array, first: jax.Array, size: int, axis: int = 1) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, first, size, axis)


def _write(arrays: Any, parts: Any, first: jax.Array, axis: int = 1) -> Any:
    """Write each part to its array, starting at token `first`; return the arrays."""
    return jax.tree.map(
        lambda x, part: jax.lax.dynamic_update_slice_in_dim(x, part, first, axis), arrays, parts
    )


def _parts(x: jax.Array, axis: int, n: int) -> jax.Array:
    """Split an axis into n equal parts, stacked along a new leading axis."""
    shape = *x.shape[:axis], n, x.shape[axis] // n, *x.shape[axis + 1 :]
    return jnp.moveaxis(x.reshape(shape), axis, 0)


def _joined(parts: jax.Array) -> jax.Array:
    """Undo `_parts` along axis 1."""
    x = jnp.moveaxis(parts, 0, 1)
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2], *x.shape[3:])


def _halves(x_BT: jax.Array) -> jax.Array:
    return _parts(x_BT, 1, 2)


def _halves_at(at: TokenPositions) -> TokenPositions:
    return jax.tree.map(lambda x: _parts(x, x.ndim - 1, 2), at)


def _slice_of(at: TokenPositions, axes: Axes, device: Any) -> TokenPositions:
    """Return the positions of one device's tokens, given the positions of the whole row."""

    def take(x: jax.Array) -> jax.Array:
        T = x.shape[-1] // jax.lax.axis_size(axes)
        return jax.lax.dynamic_slice_in_dim(x, device * T, T, axis=-1)

    return jax.tree.map(take, at)
