"""Partition rules: which mesh axes each logical axis of the model is split over.

The model names what its dimensions mean (`embed`, `heads`, `mlp`, ...); the tables below say
where each meaning lives. A ZeRO stage (arXiv 1910.02054) is a choice of tables: moments,
gradients and parameters are split over `fsdp` or not. Megatron's tensor parallelism (arXiv
1909.08053) is the same in all stages.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxgpt.config import axes_with

Params = dict[str, Any]  # nested, with arrays or what stands for them
Rules = dict[str, tuple[str, ...]]
LogicalAxes = tuple[str | None, ...]

(TENSOR,) = axes_with("splits_layers")
(FSDP,) = axes_with("shards_parameters")


def tensor_rules() -> Rules:
    """Return where the dims lie that Megatron's tensor parallelism splits."""
    return dict.fromkeys(("vocab", "heads", "mlp"), (TENSOR,))


def fully_sharded_rules() -> Rules:
    """Return the same for what a ZeRO stage shards."""
    return tensor_rules() | {"embed": (FSDP,)}


def parameter_rules(zero_stage: int) -> Rules:
    """Return where parameters live between steps."""
    return fully_sharded_rules() if zero_stage >= 3 else tensor_rules()


def gradient_rules(zero_stage: int, reduces_once: bool = False) -> Rules:
    """Return where gradients add up during the backward pass, of one microbatch or of all."""
    return fully_sharded_rules() if zero_stage >= 2 and not reduces_once else tensor_rules()


def opt_state_rules(zero_stage: int) -> Rules:
    """Return where the optimizer's state lives, and where it works."""
    return fully_sharded_rules() if zero_stage >= 1 else tensor_rules()


def partition_spec(
    axes: LogicalAxes, shape: tuple[int, ...], rules: Rules, mesh_shape: Mapping[str, int]
) -> PartitionSpec:
    """Return the spec of one array.

    A dimension that its mesh axes do not divide stays whole, so that any width and vocabulary
    works on any mesh, at the price of memory. Axes of size 1 are not named.

    >>> partition_spec(("embed", "mlp"), (128, 512), parameter_rules(3), mesh.shape)
    PartitionSpec('fsdp', 'tensor')
    """
    assert len(axes) == len(shape), (axes, shape)
    spec = []
    for axis, size in zip(axes, shape, strict=True):
        over = tuple(a for a in rules.get(axis, ()) if mesh_shape[a] > 1)
        divides = size % math.prod(mesh_shape[a] for a in over) == 0
        spec.append((over[0] if len(over) == 1 else over) if over and divides else None)
    return PartitionSpec(*spec)


def partition_specs(weights: Any, rules: Rules, mesh: Mesh) -> Any:
    """Return the `PartitionSpec` of every weight of a tree: what has `axes` and a `shape`."""
    return jax.tree.map(lambda w: partition_spec(w.axes, w.shape, rules, mesh.shape), weights)


def shardings(specs: Any, mesh: Mesh, memory_kind: str | None = None) -> Any:
    """Return a `NamedSharding` for every `PartitionSpec` of a pytree."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec, memory_kind=memory_kind),
        specs,
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )


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
