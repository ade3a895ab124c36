"""ZeRO (arXiv 1910.02054): explicit collectives that gather weights and reduce gradients.

`all_gather_param` gathers a weight where a layer uses it. If the gradient accumulator of the weight
is sharded, the backward pass reduce-scatters the gradient. `reduce_gradients` does the remaining
reduction, once per step.
"""

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
    """The sharding and dtypes of a parameter and its gradient. Specs omit mesh axes of size 1."""

    param: PartitionSpec  # the parameter between steps
    accum: PartitionSpec  # its gradient accumulator
    grad: PartitionSpec  # the gradient that the optimizer receives
    partial_axes: frozenset[str]  # mesh axes along which each device has only a partial gradient
    gather_dtype: str  # dtype of the parameter when it is gathered and used
    reduce_dtype: str  # dtype of gradients when they are summed over `partial_axes`
    host_terms: int = 0
    """Number of gradients (microbatches times slices) whose sum is kept in host memory, or 0 if the
    parameter is in device memory. Each gradient is reduced over devices before it is added."""

    @property
    def mesh_axes(self) -> frozenset[str]:
        """Mesh axes that shard the parameter between steps."""
        return frozenset(jax.tree.leaves(tuple(self.param)))


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["shard", "grad_accumulator"],
    meta_fields=["layout"],
)
@dataclasses.dataclass(frozen=True)
class ShardedParam:
    """A parameter of a network that runs inside `jax.shard_map`."""

    shard: jax.Array  # this device's shard, with the spec `layout.param`
    grad_accumulator: jax.Array  # receives the gradient, with the spec `layout.accum`
    layout: ParamLayout


def all_gather_param(param: ShardedParam) -> jax.Array:
    """Cast a parameter to `gather_dtype`, and all-gather it if it is sharded over `fsdp`.

    A parameter in host memory is first moved to the device.

    The backward pass returns the float32 gradient with respect to `grad_accumulator`, but no
    gradient with respect to `shard`. The gradient is reduce-scattered if `layout.accum` is sharded
    over `fsdp`. If `layout.host_terms` is not 0, the gradient is instead reduced as in
    `reduce_gradients` and moved to host memory. If `layout.host_terms` is more than 1, the
    accumulator is added before the move.
    """
    return _all_gather(param.shard, param.grad_accumulator, param.layout)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _all_gather(shard: jax.Array, grad_accumulator: jax.Array, layout: ParamLayout) -> jax.Array:
    shard = to_device(shard).astype(layout.gather_dtype)
    dim = _fsdp_dim(layout.param)
    if dim is None:
        return shard
    return jax.lax.all_gather(shard, layout.param[dim], axis=shard.ndim + dim, tiled=True)


def _all_gather_forward(
    shard: jax.Array, grad_accumulator: jax.Array, layout: ParamLayout
) -> tuple[jax.Array, jax.Array | None]:
    adds_up = layout.host_terms > 1
    return _all_gather(shard, grad_accumulator, layout), grad_accumulator if adds_up else None


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
    """Return this device's parameter shards and zero-initialized gradient accumulators.

    The accumulators are float32 arrays with the spec `layout.accum`. They are in host memory if
    `layout.host_terms` is not 0.

    The parameters are marked as varying along `layout.partial_axes`. Otherwise, `shard_map` would
    sum the gradients over these axes in every backward pass.

    Args:
        params: tree of this device's shards.
        layouts: tree with the `ParamLayout` of each parameter.
    """

    def zero_accumulator(param: jax.Array, layout: ParamLayout) -> jax.Array:
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

    return jax.tree.map(own, params, layouts), jax.tree.map(zero_accumulator, params, layouts)


def reduce_gradients(gradients: Any, layouts: Any) -> Any:
    """Sum gradients over `layout.partial_axes`. Return the sums with the sharding `layout.grad`.

    The gradients are float32 arrays with the spec `layout.accum`, communicated in
    `layout.reduce_dtype`. If `layout.grad` is sharded over `fsdp`, gradients are first
    reduce-scattered over `fsdp`, unless the backward pass has already done so. The all-reduce over
    the other axes then sends only a shard. Do not call this if parallel.offload=state, because the
    backward pass has already reduced the gradients.
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
    """Return this device's shard of the sum over `fsdp`, in float32."""
    dim = _fsdp_dim(spec)
    return reduce_scatter(x.astype(dtype), spec[dim], x.ndim + dim).astype(jnp.float32)


def _fsdp_dim(spec: PartitionSpec) -> int | None:
    return split_dim(spec, axes_with("shards_parameters"))
