"""The ZeRO stages (arXiv 1910.02054), written out: where weights and gradients lie in a step."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxgpt.config import axes_with
from jaxgpt.parallel.collectives import reduce_scatter, varying
from jaxgpt.parallel.offload import to_device, to_host
from jaxgpt.parallel.sharding import split_dim


@dataclasses.dataclass(frozen=True)
class ParamLayout:
    """Where a parameter and its gradient lie during a step. Specs do not name axes of size 1."""

    param: PartitionSpec  # of the parameter between steps
    accum: PartitionSpec  # of its gradient while microbatches add up
    grad: PartitionSpec  # of the gradient that the optimizer gets
    partial_axes: frozenset[str]  # along which each device finds only a part of the gradient
    gather_dtype: str
    reduce_dtype: str  # of gradients between devices
    host_terms: int = 0
    """Gradients that add up in the host's memory: microbatches and slices of them. Each is reduced
    as soon as it is known. 0 for parameters on the device."""

    @property
    def mesh_axes(self) -> frozenset[str]:
        """Mesh axes that the parameter is split over between steps."""
        return frozenset(jax.tree.leaves(tuple(self.param)))


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["shard", "grad_slot"], meta_fields=["layout"]
)
@dataclasses.dataclass(frozen=True)
class ShardedParam:
    """A parameter inside a step."""

    shard: jax.Array  # this device's part, as it lies between steps
    grad_slot: jax.Array  # zeros that stand for it in the gradient, sharded as `layout.accum`
    layout: ParamLayout


def all_gather_param(param: ShardedParam) -> jax.Array:
    """All-gather a parameter over `fsdp`; its gradient goes to `grad_slot`, scattered or not."""
    return _all_gather(param.shard, param.grad_slot, param.layout)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _all_gather(shard: jax.Array, grad_slot: jax.Array, layout: ParamLayout) -> jax.Array:
    shard = to_device(shard).astype(layout.gather_dtype)
    dim = _fsdp_dim(layout.param)
    if dim is None:
        return shard
    return jax.lax.all_gather(shard, layout.param[dim], axis=shard.ndim + dim, tiled=True)


def _all_gather_forward(
    shard: jax.Array, grad_slot: jax.Array, layout: ParamLayout
) -> tuple[jax.Array, jax.Array | None]:
    adds_up = layout.host_terms > 1
    return _all_gather(shard, grad_slot, layout), grad_slot if adds_up else None


def _all_gather_backward(
    layout: ParamLayout, in_host: jax.Array | None, gradient: jax.Array
) -> tuple[Any, ...]:
    if layout.host_terms:
        reduced = _reduce(gradient.astype(jnp.float32), layout, is_scattered=False)
        return None, to_host(reduced if in_host is None else to_device(in_host) + reduced)
    if _fsdp_dim(layout.accum) is None:
        return None, gradient.astype(jnp.float32)
    return None, _scatter_sum(gradient, layout.accum, layout.reduce_dtype)


_all_gather.defvjp(_all_gather_forward, _all_gather_backward)


def local_params(params: Any, layouts: Any) -> tuple[Any, Any]:
    """Return this device's parameters, and zeros like the gradients that it sums up.

    Those in the host's memory are the first of its sums, to which gradients are added.

    The parameters are marked as its own: `shard_map` does not sum their gradients by itself.
    """

    def zeros(param: jax.Array, layout: ParamLayout) -> jax.Array:
        shape = list(param.shape)
        if (dim := _fsdp_dim(layout.param)) is not None:
            shape[dim] *= jax.lax.axis_size(layout.param[dim])
        if (dim := _fsdp_dim(layout.accum)) is not None:
            shape[dim] //= jax.lax.axis_size(layout.accum[dim])
        if layout.host_terms:
            axes = frozenset(jax.tree.leaves(tuple(layout.accum)))
            return to_host(varying(jnp.zeros(shape, jnp.float32), axes))
        return varying(jnp.zeros(shape, jnp.float32), layout.partial_axes | layout.mesh_axes)

    def own(param: jax.Array, layout: ParamLayout) -> jax.Array:
        return varying(param, layout.partial_axes - layout.mesh_axes)

    return jax.tree.map(own, params, layouts), jax.tree.map(zeros, params, layouts)


def reduce_gradients(gradients: Any, layouts: Any) -> Any:
    """Return gradients of the whole batch, where the optimizer wants them: one reduction a step.

    Over `fsdp` first, after which what is sent over `data` is that much less.
    """
    return jax.tree.map(
        lambda g, layout: _reduce(g, layout, _fsdp_dim(layout.accum) is not None),
        gradients,
        layouts,
    )


def _reduce(gradient: jax.Array, layout: ParamLayout, is_scattered: bool) -> jax.Array:
    axes = layout.partial_axes
    if (dim := _fsdp_dim(layout.grad)) is not None:
        axes = axes - set(jax.tree.leaves(layout.grad[dim]))
        if not is_scattered:
            gradient = _scatter_sum(gradient, layout.grad, layout.reduce_dtype)
    if not axes:
        return gradient
    sent = gradient.astype(layout.reduce_dtype)
    return jax.lax.psum(sent, tuple(sorted(axes))).astype(gradient.dtype)


def _scatter_sum(x: jax.Array, spec: PartitionSpec, dtype: str) -> jax.Array:
    """Return this device's part of the sum over `fsdp`, in float32."""
    dim = _fsdp_dim(spec)
    return reduce_scatter(x.astype(dtype), spec[dim], x.ndim + dim).astype(jnp.float32)


def _fsdp_dim(spec: PartitionSpec) -> int | None:
    return split_dim(spec, axes_with("shards_parameters"))
