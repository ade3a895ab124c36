"""Partition rules: which mesh axes each logical axis of the model is split over.

The model names what its dimensions mean (`embed`, `heads`, `mlp`, ...); the tables below say where
each meaning lives. A ZeRO stage (arXiv 1910.02054) is a choice of tables.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxgpt.config import axes_with

Params = dict[str, Any]  # nested, with arrays or what stands for them
Rules = dict[str, tuple[str, ...]]
LogicalAxes = tuple[str | None, ...]

HEAD_DIMS = ("vocab", "heads", "kv_heads", "mlp")  # logical axes that tensor parallelism splits


def tensor_rules() -> Rules:
    """Return the rules without ZeRO: heads are split over `tensor`, and layers over stages."""
    heads = dict.fromkeys(HEAD_DIMS, axes_with("splits_heads"))
    return heads | {"layers": axes_with("splits_layers")}


def fully_sharded_rules() -> Rules:
    """Return the rules of tensor parallelism and ZeRO."""
    return tensor_rules() | {"embed": axes_with("shards_parameters")}


def parameter_rules(zero_stage: int) -> Rules:
    """Return where parameters live between steps."""
    return fully_sharded_rules() if zero_stage >= 3 else tensor_rules()


def gradient_rules(zero_stage: int, reduces_once: bool = False, in_host: bool = False) -> Rules:
    """Return where gradients add up during the backward pass, of one microbatch or of all.

    `reduces_once` is parallel.reduce_every=step with accumulation: whole until the last microbatch.
    Before the update they are reduced to what the optimizer wants (`opt_state_rules`), at stage 1
    as well; in the host's memory they have been already.
    """
    if in_host:
        return opt_state_rules(zero_stage)
    return fully_sharded_rules() if zero_stage >= 2 and not reduces_once else tensor_rules()


def opt_state_rules(zero_stage: int) -> Rules:
    """Return where the optimizer's state lives, and where it works."""
    return fully_sharded_rules() if zero_stage >= 1 else tensor_rules()


def is_used_in_part(axes: LogicalAxes, spec: PartitionSpec) -> bool:
    """Return whether each device along `tensor` uses its part only of a weight stored whole.

    So it is with a vocabulary or key-value heads that `tensor` does not divide, and with the norms
    of heads (`head_dim`), as the heads are split.
    """
    is_split = split_dim(spec, axes_with("splits_heads")) is not None
    return not is_split and any(axis in (*HEAD_DIMS, "head_dim") for axis in axes)


def split_dim(spec: PartitionSpec, mesh_axes: Sequence[str]) -> int | None:
    """Return the dim of an array that is split over some of these mesh axes; None without one.

    Dims count from the last, -1, because the array of one layer lacks the first dim of the stack.
    """
    for dim in range(-len(spec), 0):
        if set(jax.tree.leaves(spec[dim])) & set(mesh_axes):
            return dim
    return None


def partition_spec(
    axes: LogicalAxes, shape: tuple[int, ...], rules: Rules, mesh_shape: Mapping[str, int]
) -> PartitionSpec:
    """Return the spec of one array. A dimension that its mesh axes do not divide stays whole.

    >>> partition_spec(("embed", "mlp"), (128, 512), parameter_rules(3), mesh.shape)
    PartitionSpec('fsdp', 'tensor')
    """
    spec = []
    for axis, size in zip(axes, shape, strict=True):
        over = tuple(a for a in rules.get(axis, ()) if mesh_shape[a] > 1)
        divides = size % math.prod(mesh_shape[a] for a in over) == 0
        spec.append((over[0] if len(over) == 1 else over) if over and divides else None)
    return PartitionSpec(*spec)


def weight_shardings(weights: Any, rules: Rules, mesh: Mesh, memory_kind: str | None = None) -> Any:
    """Return a `NamedSharding` for every weight of a tree: what has `axes` and a `shape`."""

    def sharding(weight: Any) -> NamedSharding:
        spec = partition_spec(weight.axes, weight.shape, rules, mesh.shape)
        return NamedSharding(mesh, spec, memory_kind=memory_kind)

    return jax.tree.map(sharding, weights)


def undivided_dims_warnings(weights: Any, rules: Rules, mesh: Mesh) -> tuple[str, ...]:
    """Return a sentence for every kind of dim that stays whole because it cannot be divided."""
    found = set()
    for w in jax.tree.leaves(weights):
        spec = partition_spec(w.axes, w.shape, rules, mesh.shape)
        for axis, size, over in zip(w.axes, w.shape, spec, strict=True):
            parts = math.prod(mesh.shape[a] for a in rules.get(axis, ()))
            if parts > 1 and over is None:
                found.add(f"{axis}={size} stays whole on every device: {parts} does not divide it")
    return tuple(sorted(found))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding of token ids (B, T+1): rows over the axes that split the batch."""
    axes = axes_with("splits_batch")
    n = math.prod(mesh.shape[axis] for axis in axes)
    return NamedSharding(mesh, partition_spec(("batch", None), (n, 1), {"batch": axes}, mesh.shape))


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding of an array that every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())
