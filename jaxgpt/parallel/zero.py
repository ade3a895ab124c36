"""The ZeRO stages (arXiv 1910.02054), written out: where weights and gradients lie in a step."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxgpt.parallel.collectives import reduce_scatter
from jaxgpt.parallel.sharding import FSDP, TENSOR, LogicalAxes


@dataclasses.dataclass(frozen=True)
class ParamLayout:
    """Where a parameter and its gradient lie during a step.

    Dimensions count from the last, -1: a layer's slice of a stacked parameter lies as the stack.
    """

    mesh_axes: frozenset[str]
    """Mesh axes that the parameter is split over between steps."""
    param_fsdp_dim: int | None
    """Dimension that is split over `fsdp` between steps; None if it is whole there."""
    accum_fsdp_dim: int | None
    """The same of the gradient while microbatches add up."""
    grad_fsdp_dim: int | None
    """The same of the gradient that the optimizer gets."""
    partial_axes: frozenset[str]
    """Mesh axes along which each device has found only a part of the gradient."""
    travels_in_dtype: bool
    """Cast to the compute dtype before it is gathered."""
    reduce_dtype: str
    """In which gradients travel."""


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["shard", "grad_slot"],
    meta_fields=["layout"],
)
@dataclasses.dataclass(frozen=True)
class ShardedParam:
    """A parameter inside a step."""

    shard: jax.Array
    """This device's part, as it lies between steps."""
    grad_slot: jax.Array
    """Zeros that the loss is differentiated by in its place, sharded by `accum_fsdp_dim`."""
    layout: ParamLayout


def param_layout(
    param: PartitionSpec,
    accum: PartitionSpec,
    grad: PartitionSpec,
    axes: LogicalAxes,
    tensor: int,
    reduce_axes: tuple[str, ...],
    sequence_parallel: bool,
    reduce_dtype: str,
) -> ParamLayout:
    """Return the layout of a parameter that lies as these specs say between steps, as gradients
    add up, and for the optimizer. Axes of size 1 are not in them.

    With sequence parallelism a device's norms, positions and biases meet only the device's own
    positions: their gradients are partial along `tensor` too.
    """
    split = frozenset(axis for axis in param if axis)
    # A vocabulary that `tensor` does not divide is stored whole, and each device uses its share.
    own_part = tensor > 1 and TENSOR not in split and (sequence_parallel or "vocab" in axes)
    return ParamLayout(
        mesh_axes=split,
        param_fsdp_dim=_fsdp_dim(param),
        accum_fsdp_dim=_fsdp_dim(accum),
        grad_fsdp_dim=_fsdp_dim(grad),
        partial_axes=frozenset(reduce_axes) | ({TENSOR} if own_part else set()),
        travels_in_dtype=travels_in_dtype(axes),
        reduce_dtype=reduce_dtype,
    )


def travels_in_dtype(axes: LogicalAxes) -> bool:
    """Return whether a parameter is gathered in the compute dtype; vectors stay in float32."""
    return len([axis for axis in axes if axis != "layers"]) > 1


def _fsdp_dim(spec: PartitionSpec) -> int | None:
    return spec.index(FSDP) - len(spec) if FSDP in spec else None


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def all_gather_param(
    shard: jax.Array, grad_slot: jax.Array, layout: ParamLayout, dtype: jnp.dtype
) -> jax.Array:
    """All-gather a parameter over `fsdp`; its gradient goes to `grad_slot`, scattered or not."""
    del grad_slot
    if layout.travels_in_dtype:
        shard = shard.astype(dtype)
    if layout.param_fsdp_dim is not None:
        dim = shard.ndim + layout.param_fsdp_dim
        shard = jax.lax.all_gather(shard, FSDP, axis=dim, tiled=True)
    return shard


def _all_gather_param_forward(shard, grad_slot, layout, dtype):
    return all_gather_param(shard, grad_slot, layout, dtype), None


def _all_gather_param_backward(layout, dtype, _, gradient):
    if layout.accum_fsdp_dim is None:
        return None, gradient.astype(jnp.float32)
    return None, _scatter_sum(gradient, layout.accum_fsdp_dim, layout.reduce_dtype)


all_gather_param.defvjp(_all_gather_param_forward, _all_gather_param_backward)


def mark_varying_params(params: Any, layouts: Any) -> Any:
    """Return the parameters as each device's own: gradients are not summed by themselves."""
    return jax.tree.map(
        lambda param, layout: varying(param, layout.partial_axes - layout.mesh_axes),
        params,
        layouts,
    )


def zero_gradients(params: Any, layouts: Any, fsdp: int) -> Any:
    """Return zeros in the shape that each parameter's gradient is summed up in, on this device."""

    def zeros(param: jax.Array, layout: ParamLayout) -> jax.Array:
        shape = list(param.shape)
        if layout.param_fsdp_dim is not None:
            shape[layout.param_fsdp_dim] *= fsdp
        if layout.accum_fsdp_dim is not None:
            shape[layout.accum_fsdp_dim] //= fsdp
        return varying(jnp.zeros(shape, jnp.float32), layout.partial_axes | layout.mesh_axes)

    return jax.tree.map(zeros, params, layouts)


def reduce_gradients(gradients: Any, layouts: Any) -> Any:
    """Return gradients of the whole batch, where the optimizer wants them: one reduction a step.

    Over `fsdp` first, after which what travels over `data` is that much less.
    """

    def reduce(gradient: jax.Array, layout: ParamLayout) -> jax.Array:
        axes = layout.partial_axes
        if layout.grad_fsdp_dim is not None and FSDP in axes:
            axes = axes - {FSDP}
            if layout.accum_fsdp_dim is None:
                gradient = _scatter_sum(gradient, layout.grad_fsdp_dim, layout.reduce_dtype)
        if not axes:
            return gradient
        travelling = gradient.astype(layout.reduce_dtype)
        return jax.lax.psum(travelling, tuple(sorted(axes))).astype(gradient.dtype)

    return jax.tree.map(reduce, gradients, layouts)


def _scatter_sum(x: jax.Array, dimension: int, dtype: str) -> jax.Array:
    """Return this device's part of the sum over `fsdp`, in float32."""
    return reduce_scatter(x.astype(dtype), FSDP, x.ndim + dimension).astype(jnp.float32)


def varying(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    """Return `x`, the same along `axes` so far, as something that may differ there."""
    return jax.lax.pcast(x, tuple(sorted(axes)), to="varying") if axes else x
