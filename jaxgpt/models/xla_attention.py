"""Causal self-attention as XLA compiles it: the T x T scores, masked."""

import jax
import jax.numpy as jnp

from jaxgpt.kernels.dropout import drop_elements

# Of `causal_attention`: two blocks from 64 positions on, three or four where each has 128. On CPUs,
# more or shorter ones take longer than what they leave out saves.
MOST_BLOCKS, LEAST_POSITIONS, LEAST_POSITIONS_OF_TWO = 4, 128, 32


def document_starts(tokens_BT: jax.Array, end_of_text: int) -> jax.Array:
    """Return starts_BT: the position where each token's document begins in its row.

    A document ends with its end-of-text token; that which a row begins with begins at 0.
    """
    is_end_BT = tokens_BT[:, :-1] == end_of_text
    begins_BT = jnp.where(is_end_BT, jnp.arange(1, tokens_BT.shape[1]), 0)
    return jax.lax.cummax(jnp.pad(begins_BT, ((0, 0), (1, 0))), axis=1)


def causal_attention(
    q_BTHK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGK: jax.Array,
    keys_BH: jax.Array | None = None,
    starts_BT: jax.Array | None = None,
    dropout: float = 0.0,
    window: int | None = None,
) -> jax.Array:
    """Attend in a few blocks of queries, which do not meet the keys after their last.

    Of the T x T scores, n blocks compute the share (n + 1) / 2n, less with a window. Which weights
    are dropped depends on the blocks.
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
        first = max(j for j in range(i + 1) if offsets[j] <= oldest)  # block of keys
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
    """Return softmax(q k^T / sqrt(K)) v over past positions, in q's dtype; softmax in float32.

    Args:
        dropout: rate at which attention weights are dropped where `keys_BH` are given.
        window: number of positions that a query attends to, the last of them its own.
        position_offset: position of the first query.
        key_positions_S: positions of the keys, where they are not 0, 1, ...
    """
    T, H, K = q_BTHK.shape[1:]
    k_BSHK = repeat_heads(k_BSGK, H)
    if q_BTHK.dtype == jnp.float32:
        scores_BHTS = inner_products(q_BTHK * K**-0.5, k_BSHK)
    else:  # scaled queries would be rounded
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


def repeat_heads(x_BSGK: jax.Array, H: int) -> jax.Array:
    """Return x_BSHK: keys or values for each of H query heads, which share those of G heads."""
    G = x_BSGK.shape[2]
    return x_BSGK if G == H else jnp.repeat(x_BSGK, H // G, axis=2)


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
