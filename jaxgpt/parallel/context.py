"""Context parallelism: each device holds a slice of every sequence.

`split_sequence` returns an attention function for slices of rows. This function takes slices of q,
k and v, and the positions of whole rows (from `gather_positions`).

Ulysses (arXiv 2309.14509): all-to-alls give each device all positions of some heads, and another
all-to-all returns the results. The attention kernel is the same as for whole rows.

Ring attention (arXiv 2310.01889): keys and values are sent around a ring of devices; see
`parallel.ring`. With n devices, a row has 2n chunks. In the zigzag layout (`zigzag_schedule`),
device i holds chunk i (its early chunk) and chunk 2n-1-i (its late chunk). Causal attention then
takes the same time on all devices.

Attention functions and schedules run inside `jax.shard_map`. The argument `axes` holds the mesh
axes that split the sequence.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxgpt.config import Config, MeshShape
from jaxgpt.config.validate import ring_obstacle, ulysses_obstacle
from jaxgpt.kernels.attention import QUERY_BLOCK, Attention, TokenPositions
from jaxgpt.parallel.ring import Axes, ring_attention
from jaxgpt.parallel.schedule import Schedule
from jaxgpt.parallel.tensor import ParallelContext

# With this many tokens per device, attending to one block on an H100 (2e14 FLOP/s) takes as long as
# sending the next block to another host (50 GB/s). This assumes as many key-value heads as query
# heads.
RING_TOKENS = 8192


def choose_implementation(
    config: Config, shape: MeshShape, devices_per_host: int | None
) -> tuple[str, str]:
    """Return `ulysses` or `ring`, and the reason for the choice.

    If parallel.context_impl is not `auto`, its value is returned unchecked. With `auto`, at least
    one implementation must be supported.

    Args:
        devices_per_host: number of devices per host, in mesh order. If None, all devices are
            assumed to share a host.
    """
    model, chosen = config.model, config.parallel.context_impl
    if chosen != "auto":
        return chosen, f"parallel.context_impl={chosen}"
    if obstacle := ulysses_obstacle(config, shape):
        return "ring", obstacle
    if obstacle := ring_obstacle(config, shape):
        return "ulysses", f"ring attention is not possible: {obstacle}"
    n = shape.split_of("splits_sequence")
    neighbors = n * shape.split_of("splits_heads")  # the innermost axes
    per_host = min(devices_per_host or shape.n_devices, shape.n_devices)
    if per_host % neighbors == 0:
        return "ulysses", "it divides the heads, and its devices share a host"
    tokens = model.block_size // n
    if tokens < RING_TOKENS:
        return "ulysses", (
            f"{tokens} tokens per device are too few to hide the transfers of ring attention "
            f"behind computation (fewer than {RING_TOKENS})"
        )
    return "ring", (
        f"it spans hosts, and {tokens} tokens per device hide the transfers behind computation"
    )


class SequenceSplit(NamedTuple):
    """The result of `split_sequence`."""

    attend: Attention
    wrap_schedule: Callable[[Schedule], Schedule]  # the identity, except for ring attention
    note: str  # for the log; empty if no axis splits the sequence


def split_sequence(
    config: Config,
    shape: MeshShape,
    context: ParallelContext,
    attend: Attention,
    devices_per_host: int | None,
) -> SequenceSplit:
    """Return the attention function and the schedule wrapper for slices of rows.

    `ulysses` applies `attend` to whole rows. `ring` uses `ring_attention` instead of `attend`. If
    no axis splits the sequence, `attend` and the schedule stay unchanged.

    Args:
        attend: attention function for whole rows.
        devices_per_host: see `choose_implementation`.
    """
    axes, unchanged = context.sequence_axes, lambda schedule: schedule
    if not axes:
        return SequenceSplit(attend, unchanged, "")
    impl, reason = choose_implementation(config, shape, devices_per_host)
    n = shape.split_of("splits_sequence")
    note = f"{' x '.join(axes)} = {n} uses {impl}, because {reason}"
    if impl == "ring":
        note += f"; its blocks run through a kernel that takes {QUERY_BLOCK} queries at a time"
        ring = functools.partial(ring_attention, axes)
        return SequenceSplit(ring, functools.partial(zigzag_schedule, context), note)
    G = config.model.kv_heads
    G = G // context.tensor if G % context.tensor == 0 else config.model.n_head // context.tensor
    if (copies := n // math.gcd(G, n)) > 1:
        note += f", with {copies} copies of each key-value head"
    return SequenceSplit(functools.partial(ulysses_attention, axes, attend), unchanged, note)


def gather_positions(at: TokenPositions, axes: Axes) -> TokenPositions:
    """Concatenate the slices (..., T) of the devices along `axes` into the positions of whole rows.

    Args:
        at: the positions of this device's tokens; returned unchanged if `axes` is empty.
    """
    if not axes:
        return at
    return jax.tree.map(lambda x: jax.lax.all_gather(x, axes, axis=x.ndim - 1, tiled=True), at)


# Ulysses


def ulysses_attention(
    axes: Axes,
    attend: Attention,
    q_BTHK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGK: jax.Array,
    q_at: TokenPositions,
    k_at: TokenPositions,
    window: int | None,
    keys_BH: jax.Array | None,
) -> jax.Array:
    """Apply `attend` to whole rows, for this device's share of the heads.

    The number of devices along `axes` must divide H. Key-value heads are repeated if it does not
    divide G. This takes two all-to-alls if there are then as many key-value heads as query heads,
    and three otherwise.

    Args:
        q_BTHK, k_BTGK, v_BTGK: this device's slice of the rows.
        q_at, k_at: positions of whole rows.

    Returns:
        out_BTHK for this device's slice of the rows; see `kernels.attention.Attention`.
    """
    n, H = jax.lax.axis_size(axes), q_BTHK.shape[2]
    copies = n // math.gcd(k_BTGK.shape[2], n)
    kv_BTCGK = jnp.stack([k_BTGK, v_BTGK], axis=2).repeat(copies, axis=3)
    to_heads = functools.partial(_all_to_all, axes=axes, split=3, join=1)
    if kv_BTCGK.shape[3] == H:
        qkv_BTCHK = to_heads(jnp.concatenate([q_BTHK[:, :, None], kv_BTCGK], axis=2))
        q_BTHK, k_BTGK, v_BTGK = (x.squeeze(2) for x in jnp.split(qkv_BTCHK, 3, axis=2))
    else:
        q_BTHK = to_heads(q_BTHK[:, :, None]).squeeze(2)
        k_BTGK, v_BTGK = (x.squeeze(2) for x in jnp.split(to_heads(kv_BTCGK), 2, axis=2))
    if keys_BH is not None:
        first = jax.lax.axis_index(axes) * (H // n)
        keys_BH = jax.lax.dynamic_slice_in_dim(keys_BH, first, H // n, axis=1)
    out_BTHK = attend(q_BTHK, k_BTGK, v_BTGK, q_at, k_at, window, keys_BH)
    return _all_to_all(out_BTHK, axes, split=1, join=2)


def _all_to_all(x: jax.Array, axes: Axes, split: int, join: int) -> jax.Array:
    return jax.lax.all_to_all(x, axes, split_axis=split, concat_axis=join, tiled=True)


# The zigzag layout


def zigzag_schedule(context: ParallelContext, schedule: Schedule) -> Schedule:
    """Return a schedule that moves the batch to the zigzag layout and then runs `schedule`.

    The `run_all_blocks` of the returned schedule returns hidden states in the original layout.
    """
    axes = context.sequence_axes

    def in_zigzag(batch: Any) -> Any:  # all arrays except the row numbers have a dim T
        return jax.tree.map(lambda x: to_zigzag(x, axes) if x.ndim > 1 else x, batch)

    def run_all_blocks(pieces: Any, batch: Any, key: Any) -> tuple[jax.Array, Any]:
        x_BTD, aux = schedule.run_all_blocks(pieces, in_zigzag(batch), key)
        if not context.sequence_parallel:
            return from_zigzag(x_BTD, axes), aux
        x_BTD = from_zigzag(context.copy_to_tensor_region(x_BTD), axes)
        T = x_BTD.shape[1] // context.tensor
        return jax.lax.dynamic_slice_in_dim(x_BTD, context.tensor_offset(T), T, axis=1), aux

    def gradients(objective: Any, params: Any, accumulators: Any, microbatches: Any) -> Any:
        microbatches = microbatches._replace(batch=in_zigzag(microbatches.batch))
        return schedule.gradients(objective, params, accumulators, microbatches)

    return Schedule(run_all_blocks, gradients)


def to_zigzag(x_BT: jax.Array, axes: Axes) -> jax.Array:
    """Exchange chunks of rows, and return this device's part of the zigzag layout: (B, T, ...).

    `x_BT` (B, T, ...) is this device's slice of the rows. On device d, the slice consists of chunks
    2d and 2d+1. T must be even.
    """
    even, odd = _zigzag_moves(jax.lax.axis_size(axes))
    first, second = jnp.split(x_BT, 2, axis=1)
    first, second = jax.lax.ppermute(first, axes, even), jax.lax.ppermute(second, axes, odd)
    return _swap_halves(first, second, jax.lax.axis_index(axes) % 2 == 1)


def from_zigzag(x_BT: jax.Array, axes: Axes) -> jax.Array:
    """Undo `to_zigzag`."""
    even, odd = ([(b, a) for a, b in moves] for moves in _zigzag_moves(jax.lax.axis_size(axes)))
    early, late = jnp.split(x_BT, 2, axis=1)
    first, second = jnp.split(_swap_halves(early, late, jax.lax.axis_index(axes) % 2 == 1), 2, 1)
    first, second = jax.lax.ppermute(first, axes, even), jax.lax.ppermute(second, axes, odd)
    return jnp.concatenate([first, second], axis=1)


def _zigzag_moves(n: int) -> list[list[tuple[int, int]]]:
    """Return two lists of (source, destination) devices: for even chunks and for odd chunks."""
    return [[(d, min(g, 2 * n - 1 - g)) for d in range(n) for g in [2 * d + odd]] for odd in (0, 1)]


def _swap_halves(first: jax.Array, second: jax.Array, is_swapped: jax.Array) -> jax.Array:
    halves = jnp.where(is_swapped, second, first), jnp.where(is_swapped, first, second)
    return jnp.concatenate(halves, axis=1)
