"""The `Batch`: a step's token IDs, and the arrays derived from them on the devices."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jaxgpt.parallel.mesh import mesh_axes_with

NO_TOKEN = -1  # padding for shorter rows


class Batch(NamedTuple):
    """A batch, a microbatch, or one device's shard of either."""

    tokens: jax.Array  # int32 (B, T): token IDs
    targets: jax.Array  # int32 (B, T): the next token
    weights: jax.Array  # float32 (B, T): weight of each target in the loss; 0 masks it
    positions: jax.Array  # int32 (B, T): position within the segment
    segments: jax.Array  # int32 (B, T): document number within the row, from 0
    rows: jax.Array  # int32 (B,): row number in the global batch, for dropout keys


class TokenRows(NamedTuple):
    """Rows of token IDs with their loss mask."""

    tokens: jax.Array  # int32 (B, T+1)
    weights: jax.Array  # uint8 or bool (B, T+1): loss weight of each token; 0 masks it


def make_batch(rows: jax.Array | TokenRows, end_of_text: int | None = None) -> Batch:
    """Make a batch from rows of token IDs.

    Args:
        rows: int32 (B, T+1), or `TokenRows` with a weight for each target. Without weights, every
            target has weight 1.
        end_of_text: ID of the token that ends a document, for data.document_mask. If None, each row
            is one document.
    """
    if isinstance(rows, TokenRows):
        tokens, weights = rows.tokens, rows.weights[:, 1:].astype(jnp.float32)
    else:
        tokens, weights = rows, jnp.ones(rows[:, 1:].shape)
    batch = input_batch(tokens[:, :-1], end_of_text)
    return batch._replace(targets=tokens[:, 1:], weights=weights)


def input_batch(tokens: jax.Array, end_of_text: int | None = None) -> Batch:
    """Make a batch for computing logits. Its targets and weights are 0.

    If `end_of_text` is given, a new segment begins after each end-of-text token, and positions
    restart at 0. If it is None, each row is one segment.

    Args:
        tokens: int32 (B, T).
        end_of_text: ID of the token that ends a document.
    """
    B, T = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    segments = jnp.zeros((B, T), jnp.int32)
    if end_of_text is not None:
        # The end-of-text token is the last token of its document.
        begins = jnp.pad(tokens[:, :-1] == end_of_text, ((0, 0), (1, 0)))
        segments = jnp.cumsum(begins, axis=1, dtype=jnp.int32)
        positions -= jax.lax.cummax(jnp.where(begins, positions, 0), axis=1)
    return Batch(
        tokens=tokens,
        targets=jnp.zeros((B, T), jnp.int32),
        weights=jnp.zeros((B, T), jnp.float32),
        positions=positions,
        segments=segments,
        rows=jnp.arange(B, dtype=jnp.int32),
    )


def total_weight(batch: Batch) -> jax.Array:
    """Return the divisor of the loss, max(sum of the weights, 1), as a float32 scalar.

    With this divisor, a batch without targets has a loss of 0.
    """
    return jnp.maximum(batch.weights.sum(), 1.0)


def batch_specs(mesh: Mesh) -> Batch:
    """Return the `PartitionSpec` of each array in a global `Batch` on a mesh."""
    rows, positions = (
        mesh_axes_with(role, mesh) or None for role in ("splits_batch", "splits_sequence")
    )
    tokens = PartitionSpec(rows, positions)
    return Batch(tokens, tokens, tokens, tokens, tokens, PartitionSpec(rows))
