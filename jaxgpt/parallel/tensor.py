"""What the devices say to each other inside a step, written out.

A step is one program that every device runs on its own part of everything (`jax.shard_map` over
the whole mesh). All that crosses devices between tokens and gradients is in this file: Megatron's
tensor parallelism (arXiv 1909.08053), sequence parallelism (arXiv 2205.05198), and what the ZeRO
stages (arXiv 1910.02054) do with weights and gradients.

`shard_map` tracks over which mesh axes a value varies between devices, and derives the backward
pass from that: the transpose of a sum over devices is a copy to each, and of a copy a sum.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxgpt.kernels.linear import matmul
from jaxgpt.parallel.collectives import all_gather, reduce_scatter
from jaxgpt.parallel.sharding import LogicalAxes

BATCH_AXES = ("data", "fsdp")  # devices along these see different rows


class OneDevice:
    """What a model asks of the devices around it; here there are none."""

    on_cpu: bool = False
    """Whether the program is written as CPUs compute it fastest."""

    def weight(self, stored: Any) -> jax.Array:
        """A parameter, ready for use."""
        return stored

    def by_columns(self, x: jax.Array, kernel: Any, n: int) -> jax.Array:
        """x W, summed over the last n dimensions of x; W is split by what it puts out."""
        return matmul(x, kernel.astype(x.dtype), n)

    def by_rows(self, x: jax.Array, kernel: Any, n: int) -> jax.Array:
        """x W, summed over the last n dimensions of x; x and W are split by what comes in."""
        return matmul(x, kernel.astype(x.dtype), n)

    def share(self, w_VD: jax.Array, V: int) -> tuple[jax.Array, Any]:
        """This device's rows of a table of V, and the number of the first of them."""
        return w_VD, 0

    def first(self, n: int) -> Any:
        """Number of the first of this device's n, of something that is split over `tensor`."""
        return 0

    def first_position(self, T: int) -> Any:
        """Number of the first of this device's T positions, between `leave` and `enter`."""
        return 0

    def positions(self, T: int) -> int:
        """How many of T positions this device has between `leave` and `enter`."""
        return T

    def enter(self, x_BTD: jax.Array) -> jax.Array:
        """Goes before weights that are split by columns (`f` in Megatron's figure 3)."""
        return x_BTD

    def leave(self, x_BTD: jax.Array) -> jax.Array:
        """Goes after weights that are split by rows (`g`): partial results become their sum."""
        return x_BTD

    def sum(self, x: Any) -> Any:
        """The sum over devices along `tensor`."""
        return x

    def max(self, x: jax.Array) -> jax.Array:
        """The maximum over devices along `tensor`; not differentiated."""
        return x


ONE_DEVICE = OneDevice()


@dataclasses.dataclass(frozen=True)
class ManyDevices(OneDevice):
    """The same inside `shard_map`, for a device of a mesh."""

    tensor: int
    """Number of devices along `tensor`."""
    sequence_parallel: bool
    dtype: jnp.dtype
    """Of the computation. Weights travel in it."""
    on_cpu: bool = False
    gather_again: bool = False
    """Bring a layer's weights and activations together once more for its backward pass, in place
    of keeping them whole for all layers until then."""

    def weight(self, stored: "Weight") -> jax.Array:
        return _whole(stored.stored, stored.gradient, stored.layout, self.dtype)

    def by_columns(self, x: jax.Array, kernel: "Weight", n: int) -> jax.Array:
        def multiply(x: jax.Array, kernel: Weight) -> jax.Array:
            return matmul(self.enter(x), self.weight(kernel), n)

        return (jax.checkpoint(multiply) if self.gather_again else multiply)(x, kernel)

    def by_rows(self, x: jax.Array, kernel: "Weight", n: int) -> jax.Array:
        def multiply(x: jax.Array, kernel: Weight) -> jax.Array:
            return matmul(x, self.weight(kernel), n)

        return self.leave((jax.checkpoint(multiply) if self.gather_again else multiply)(x, kernel))

    def share(self, w_VD: jax.Array, V: int) -> tuple[jax.Array, Any]:
        if w_VD.shape[0] == V and self.tensor > 1:  # stored whole, because tensor divides it not
            rows = -(-V // self.tensor)
            w_VD = jnp.pad(w_VD, ((0, rows * self.tensor - V), (0, 0)))
            w_VD = jax.lax.dynamic_slice_in_dim(w_VD, self.first(rows), rows)
        return w_VD, self.first(w_VD.shape[0])

    def first(self, n: int) -> Any:
        return jax.lax.axis_index("tensor") * n if self.tensor > 1 else 0

    def first_position(self, T: int) -> Any:
        return self.first(T) if self.sequence_parallel else 0

    def positions(self, T: int) -> int:
        return T // self.tensor if self.sequence_parallel else T

    def enter(self, x_BTD: jax.Array) -> jax.Array:
        if self.tensor == 1:
            return x_BTD
        if self.sequence_parallel:
            return all_gather(x_BTD, "tensor", 1)
        return jax.lax.pcast(x_BTD, "tensor", to="varying")

    def leave(self, x_BTD: jax.Array) -> jax.Array:
        if self.tensor == 1:
            return x_BTD
        if self.sequence_parallel:
            return reduce_scatter(x_BTD, "tensor", 1)
        return jax.lax.psum(x_BTD, "tensor")

    def sum(self, x: Any) -> Any:
        return jax.lax.psum(x, "tensor") if self.tensor > 1 else x

    def max(self, x: jax.Array) -> jax.Array:
        x = jax.lax.stop_gradient(x)
        return jax.lax.pmax(x, "tensor") if self.tensor > 1 else x


@dataclasses.dataclass(frozen=True)
class WeightLayout:
    """Where a parameter and its gradient lie during a step.

    Dimensions count from the last, -1: a layer's slice of a stacked parameter lies as the stack.
    """

    split: frozenset[str]
    """Mesh axes that the parameter is split over between steps."""
    stored: int | None
    """Dimension that is split over `fsdp` between steps; None if it is whole there."""
    summed: int | None
    """The same of the gradient while microbatches add up."""
    reduced: int | None
    """The same of the gradient that the optimizer gets."""
    partial: frozenset[str]
    """Mesh axes along which each device has found only a part of the gradient."""
    is_matrix: bool
    reduce_dtype: str
    """In which gradients travel."""


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["stored", "gradient"],
    meta_fields=["layout"],
)
@dataclasses.dataclass(frozen=True)
class Weight:
    """A parameter inside a step."""

    stored: jax.Array
    """This device's part, as it lies between steps."""
    gradient: jax.Array
    """What the loss is differentiated by in its place: zeros, in the shape of `summed`."""
    layout: WeightLayout


def weight_layout(
    stored: PartitionSpec,
    summed: PartitionSpec,
    reduced: PartitionSpec,
    axes: LogicalAxes,
    tensor: int,
    batch_axes: tuple[str, ...],
    sequence_parallel: bool,
    reduce_dtype: str,
) -> WeightLayout:
    """The layout of a parameter that lies as these specs say; axes of size 1 are not in them.

    With sequence parallelism a device's norms, positions and biases meet only the device's own
    positions: their gradients are partial along `tensor` too.
    """
    split = frozenset(axis for axis in stored if axis)
    # A vocabulary that `tensor` does not divide is stored whole, and each device uses its share.
    own_part = tensor > 1 and "tensor" not in split and (sequence_parallel or "vocab" in axes)
    return WeightLayout(
        split=split,
        stored=_dimension(stored),
        summed=_dimension(summed),
        reduced=_dimension(reduced),
        partial=frozenset(batch_axes) | ({"tensor"} if own_part else set()),
        is_matrix=len([a for a in axes if a != "layers"]) > 1,
        reduce_dtype=reduce_dtype,
    )


def _dimension(spec: PartitionSpec) -> int | None:
    return spec.index("fsdp") - len(spec) if "fsdp" in spec else None


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _whole(
    stored: jax.Array, gradient: jax.Array, layout: WeightLayout, dtype: jnp.dtype
) -> jax.Array:
    """A weight whole over `fsdp`, whose gradient goes where `gradient` says, summed or not yet."""
    del gradient
    if layout.is_matrix:
        stored = stored.astype(dtype)
    if layout.stored is not None:
        stored = jax.lax.all_gather(stored, "fsdp", axis=stored.ndim + layout.stored, tiled=True)
    return stored


def _whole_forward(stored, gradient, layout, dtype):
    return _whole(stored, gradient, layout, dtype), None


def _whole_backward(layout, dtype, _, gradient):
    if layout.summed is None:
        return None, gradient.astype(jnp.float32)
    return None, _scatter_sum(gradient, layout.summed, layout.reduce_dtype)


_whole.defvjp(_whole_forward, _whole_backward)


def own_parameters(params: Any, layouts: Any) -> Any:
    """The parameters as each device's own: gradients are not summed over devices by themselves."""
    return jax.tree.map(
        lambda param, layout: varying(param, layout.partial - layout.split), params, layouts
    )


def zero_gradients(params: Any, layouts: Any, fsdp: int) -> Any:
    """Zeros in the shape that each parameter's gradient is summed up in, on this device."""

    def zeros(param: jax.Array, layout: WeightLayout) -> jax.Array:
        shape = list(param.shape)
        if layout.stored is not None:
            shape[layout.stored] *= fsdp
        if layout.summed is not None:
            shape[layout.summed] //= fsdp
        return varying(jnp.zeros(shape, jnp.float32), layout.partial | layout.split)

    return jax.tree.map(zeros, params, layouts)


def reduce_gradients(gradients: Any, layouts: Any) -> Any:
    """Gradients of the whole batch, where the optimizer wants them: one reduction per step.

    Over `fsdp` first, after which what travels over `data` is that much less.
    """

    def reduce(gradient: jax.Array, layout: WeightLayout) -> jax.Array:
        axes = layout.partial
        if layout.reduced is not None and "fsdp" in axes:
            axes = axes - {"fsdp"}
            if layout.summed is None:
                gradient = _scatter_sum(gradient, layout.reduced, layout.reduce_dtype)
        if not axes:
            return gradient
        travelling = gradient.astype(layout.reduce_dtype)
        return jax.lax.psum(travelling, tuple(sorted(axes))).astype(gradient.dtype)

    return jax.tree.map(reduce, gradients, layouts)


def _scatter_sum(x: jax.Array, dimension: int, dtype: str) -> jax.Array:
    """This device's part of the sum over `fsdp`, in float32."""
    return reduce_scatter(x.astype(dtype), "fsdp", x.ndim + dimension).astype(jnp.float32)


def varying(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    """`x`, the same along `axes` so far, from here on as something that may differ there."""
    return jax.lax.pcast(x, tuple(sorted(axes)), to="varying") if axes else x
