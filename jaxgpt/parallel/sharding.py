"""Partition rules: which mesh axes each logical axis of the model is split over.

The model names what its dimensions mean (`embed`, `heads`, `mlp`, ...); the tables below say
where each meaning lives. A ZeRO stage (arXiv 1910.02054) is a choice of tables: moments,
gradients and parameters are split over `fsdp` or not. Megatron's tensor parallelism (arXiv
1909.08053) is the same in all stages.
"""

import math
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxgpt.config import axes_with

Params = dict[str, Any]  # nested, with arrays or what stands for them
Rules = dict[str, tuple[str, ...]]
LogicalAxes = tuple[str | None, ...]


def tensor_rules() -> Rules:
    """Return where the dims lie that Megatron's tensor parallelism splits."""
    return dict.fromkeys(("vocab", "heads", "mlp"), axes_with("splits_layers"))


def fully_sharded_rules() -> Rules:
    """Return the same for what a ZeRO stage shards."""
    return tensor_rules() | {"embed": axes_with("shards_parameters")}


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
    axes: LogicalAxes, shape: tuple[int, ...], rules: Rules, mesh: Mesh
) -> PartitionSpec:
    """Return the spec of one array.

    A dimension that its mesh axes do not divide stays whole, so that any width and vocabulary
    works on any mesh, at the price of memory. Axes of size 1 are not named.

    >>> partition_spec(("embed", "mlp"), (128, 512), parameter_rules(3), mesh)
    PartitionSpec('fsdp', 'tensor')
    """
    assert len(axes) == len(shape), (axes, shape)
    spec = []
    for axis, size in zip(axes, shape, strict=True):
        over = tuple(a for a in rules.get(axis, ()) if mesh.shape[a] > 1)
        divides = size % math.prod(mesh.shape[a] for a in over) == 0
        spec.append((over[0] if len(over) == 1 else over) if over and divides else None)
    return PartitionSpec(*spec)


def partition_specs(logical_axes: Any, shapes: Any, rules: Rules, mesh: Mesh) -> Any:
    """Return the `PartitionSpec` of every leaf of a pytree of arrays or shapes."""
    return jax.tree.map(
        lambda leaf, axes: partition_spec(axes, leaf.shape, rules, mesh), shapes, logical_axes
    )


def shardings(specs: Any, mesh: Mesh, memory_kind: str | None = None) -> Any:
    """Return a `NamedSharding` for every `PartitionSpec` of a pytree."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec, memory_kind=memory_kind),
        specs,
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )


def undivided_dims_warnings(
    logical_axes: Any, shapes: Any, rules: Rules, mesh: Mesh
) -> tuple[str, ...]:
    """Return a sentence for every kind of dim that stays whole because it cannot be divided."""
    found = set()

    def look(leaf: Any, axes: LogicalAxes) -> None:
        spec = partition_spec(axes, leaf.shape, rules, mesh)
        for axis, size, over in zip(axes, leaf.shape, spec, strict=True):
            parts = math.prod(mesh.shape[a] for a in rules.get(axis, ()))
            if parts > 1 and over is None:
                found.add(f"{axis}={size} stays whole on every device: {parts} does not divide it")

    jax.tree.map(look, shapes, logical_axes)
    return tuple(sorted(found))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding of token ids (B, T+1): rows over the axes that split the batch."""
    axes = axes_with("splits_batch")
    n = math.prod(mesh.shape[axis] for axis in axes)
    return NamedSharding(mesh, partition_spec(("batch", None), (n, 1), {"batch": axes}, mesh))


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding of an array that every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())
