"""Partition rules, which map the logical axes of the model to mesh axes.

The model labels each dimension with a logical axis (`embed`, `heads`, `mlp`, ...). A ZeRO stage
(arXiv 1910.02054) determines the rules for the parameters, the gradients and the optimizer state.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxgpt.config import axes_with

Params = dict[str, Any]  # nested dict of arrays or of their descriptions
Rules = dict[str, tuple[str, ...]]  # logical axis -> mesh axes
LogicalAxes = tuple[str | None, ...]  # one for each dim; None means that the dim is never split

HEAD_DIMS = ("vocab", "heads", "kv_heads", "mlp")  # logical axes that tensor parallelism splits
LOGICAL_AXES = (*HEAD_DIMS, "embed", "head_dim", "layers", "parts")


def tensor_rules() -> Rules:
    """Return the rules for arrays that are not sharded over `fsdp`.

    These rules split `HEAD_DIMS` over `tensor`, and layers over pipeline stages.
    """
    heads = dict.fromkeys(HEAD_DIMS, axes_with("splits_heads"))
    return heads | {"layers": axes_with("splits_layers")}


def fully_sharded_rules() -> Rules:
    """Return `tensor_rules` with an additional rule that splits `embed` over `fsdp`."""
    return tensor_rules() | {"embed": axes_with("shards_parameters")}


def parameter_rules(zero_stage: int) -> Rules:
    """Return the rules for the parameters between steps, at ZeRO stage 0, 1, 2 or 3."""
    return fully_sharded_rules() if zero_stage >= 3 else tensor_rules()


def gradient_rules(zero_stage: int, reduces_once: bool = False, in_host: bool = False) -> Rules:
    """Return the rules for the gradient accumulators, which sum gradients over microbatches.

    If `reduces_once` is False, stages 2 and 3 reduce-scatter each microbatch's gradient, so the
    accumulators are sharded over `fsdp`. Accumulators in host memory have the sharding of the
    optimizer state (`opt_state_rules`). In all other cases, accumulators are not sharded over
    `fsdp`.

    Args:
        reduces_once: `Config.reduces_once`.
        in_host: whether the accumulators are in host memory (parallel.offload=state).
    """
    if in_host:
        return opt_state_rules(zero_stage)
    return fully_sharded_rules() if zero_stage >= 2 and not reduces_once else tensor_rules()


def opt_state_rules(zero_stage: int) -> Rules:
    """Return the rules for the optimizer state and the gradients that the optimizer receives."""
    return fully_sharded_rules() if zero_stage >= 1 else tensor_rules()


def has_partial_gradient(axes: LogicalAxes, spec: PartitionSpec) -> bool:
    """Return whether each `tensor` rank computes only a partial gradient of a replicated weight.

    This is true of weights whose padded vocabulary size or number of key-value heads is not
    divisible by `tensor`. It is also true of the query and key norms (`head_dim`), because each
    rank applies them only to its own heads. Sequence parallelism is not considered. If there is
    only one `tensor` rank, the result is meaningless.

    Args:
        axes: the weight's logical axes.
        spec: the weight's `PartitionSpec`, with an entry for each dim.
    """
    is_split = split_dim(spec, axes_with("splits_heads")) is not None
    return not is_split and any(axis in (*HEAD_DIMS, "head_dim") for axis in axes)


def split_dim(spec: PartitionSpec, mesh_axes: Sequence[str]) -> int | None:
    """Return the index of the first dim that any of these mesh axes splits, or None.

    The index is negative, so that it is the same for stacked layers and for a single layer. `spec`
    must have an entry for each dim.
    """
    for dim in range(-len(spec), 0):
        if set(jax.tree.leaves(spec[dim])) & set(mesh_axes):
            return dim
    return None


def partition_spec(
    axes: LogicalAxes, shape: tuple[int, ...], rules: Rules, mesh_shape: Mapping[str, int]
) -> PartitionSpec:
    """Return the spec of one array, without mesh axes of size 1.

    A dim is replicated if its size is not divisible by the number of devices along its mesh axes.
    If the number of layers is not divisible by the number of stages, one of the `HEAD_DIMS` is
    also split over the stages, if possible.

    Example, with two devices along both mesh axes:

    >>> partition_spec(("embed", "mlp"), (128, 512), parameter_rules(3), mesh.shape)
    P('fsdp', 'tensor')
    """

    def divided(size: int, over: tuple[str, ...]) -> tuple[str, ...]:
        return over if size % math.prod(mesh_shape[a] for a in over) == 0 else ()

    spec, left = [], ()
    for axis, size in zip(axes, shape, strict=True):
        over = tuple(a for a in rules.get(axis, ()) if mesh_shape[a] > 1)
        if axis in HEAD_DIMS and left and (both := divided(size, over + left)):
            over, left = both, ()
        elif not divided(size, over):
            over, left = (), over if axis == "layers" else left
        spec.append(over[0] if len(over) == 1 else over or None)
    return PartitionSpec(*spec)


def weight_shardings(weights: Any, rules: Rules, mesh: Mesh, memory_kind: str | None = None) -> Any:
    """Return a tree with the `NamedSharding` of every weight.

    Args:
        weights: tree whose leaves have attributes `axes` and `shape`, such as
            `models.weights.Weight`.
        memory_kind: JAX memory kind of the weights, such as `pinned_host`; None for device memory.
    """

    def sharding(weight: Any) -> NamedSharding:
        spec = partition_spec(weight.axes, weight.shape, rules, mesh.shape)
        return NamedSharding(mesh, spec, memory_kind=memory_kind)

    return jax.tree.map(sharding, weights)


def undivided_dims_warnings(weights: Any, rules: Rules, mesh: Mesh) -> tuple[str, ...]:
    """Return a warning for each dim that is replicated because its mesh axes do not divide it.

    A dim that several weights share is reported once. The number of layers is not checked,
    because stages may hold different numbers of layers. For the arguments, see `weight_shardings`.
    """
    found = set()
    for w in jax.tree.leaves(weights):
        spec = partition_spec(w.axes, w.shape, rules, mesh.shape)
        for axis, size, over in zip(w.axes, w.shape, spec, strict=True):
            parts = math.prod(mesh.shape[a] for a in rules.get(axis, ()))
            if parts > 1 and over is None and axis != "layers":
                found.add(f"{axis}={size} is replicated, because {parts} does not divide it")
    return tuple(sorted(found))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding of token IDs (B, T+1), whose rows are split over the batch axes."""
    axes = axes_with("splits_batch")
    n = math.prod(mesh.shape[axis] for axis in axes)
    return NamedSharding(mesh, partition_spec(("batch", None), (n, 1), {"batch": axes}, mesh.shape))


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding of an array that is replicated on all devices."""
    return NamedSharding(mesh, PartitionSpec())
