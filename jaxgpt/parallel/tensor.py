"""Tensor and sequence parallelism, written out: the collectives that layers call.

A step is one program that every device runs on its own part of everything (`jax.shard_map` over
the whole mesh). `shard_map` tracks over which mesh axes a value varies between devices, and derives
the backward pass from that: the transpose of a psum is a copy to each device, and of a copy a psum.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxgpt.kernels.linear import matmul
from jaxgpt.parallel.collectives import all_gather, reduce_scatter
from jaxgpt.parallel.zero import ShardedParam, all_gather_param


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelContext:
    """How a device shares a model with the others along `tensor`; by default it is alone.

    Megatron's tensor parallelism (arXiv 1909.08053) splits heads, the MLP and the vocabulary.
    Between these tensor regions, sequence parallelism (arXiv 2205.05198) splits positions.
    """

    tensor: int = 1  # number of devices that share a model's heads
    tensor_axes: tuple[str, ...] = ()  # the mesh axes that they are along
    sequence_axes: tuple[str, ...] = ()  # mesh axes that split the positions of a batch
    layer_axes: tuple[str, ...] = ()  # mesh axes that split the stack of layers
    sequence_parallel: bool = False
    regather_in_backward: bool = False
    """Gather a layer's weights and activations again for its backward pass; else all layers keep
    them until then."""
    on_cpu: bool = False  # CPUs need no layout constraints

    def param(self, param: jax.Array | ShardedParam) -> jax.Array:
        """Return a parameter ready for use, gathered over `fsdp`."""
        return all_gather_param(param) if isinstance(param, ShardedParam) else param

    def column_parallel_matmul(self, x: jax.Array, kernel: Any, n: int) -> jax.Array:
        """Return x W, contracted over the last n dims of x, for this device's outputs of W."""

        def multiply(x: jax.Array, kernel: Any) -> jax.Array:
            return matmul(self.copy_to_tensor_region(x), self.param(kernel).astype(x.dtype), n)

        return (jax.checkpoint(multiply) if self.regather_in_backward else multiply)(x, kernel)

    def row_parallel_matmul(self, x: jax.Array, kernel: Any, n: int) -> jax.Array:
        """Return x W, contracted over the last n dims of x, which are split as W's inputs are."""

        def multiply(x: jax.Array, kernel: Any) -> jax.Array:
            return matmul(x, self.param(kernel).astype(x.dtype), n)

        multiply = jax.checkpoint(multiply) if self.regather_in_backward else multiply
        return self.reduce_from_tensor_region(multiply(x, kernel))

    def copy_to_tensor_region(self, x_BTD: jax.Array) -> jax.Array:
        """Go before weights that are split by columns (`f` in Megatron's figure 3)."""
        if self.tensor == 1:
            return x_BTD
        if self.sequence_parallel:
            return all_gather(x_BTD, self.tensor_axes, 1)
        return jax.lax.pcast(x_BTD, self.tensor_axes, to="varying")

    def reduce_from_tensor_region(self, x_BTD: jax.Array) -> jax.Array:
        """Go after weights that are split by rows (`g`): partial results become their sum."""
        if self.tensor == 1:
            return x_BTD
        if self.sequence_parallel:
            return reduce_scatter(x_BTD, self.tensor_axes, 1)
        return jax.lax.psum(x_BTD, self.tensor_axes)

    def psum(self, x: Any) -> Any:
        """Return the sum over devices along `tensor`."""
        return jax.lax.psum(x, self.tensor_axes) if self.tensor > 1 else x

    def pmax(self, x: jax.Array) -> jax.Array:
        """Return the maximum over devices along `tensor`; not differentiated."""
        x = jax.lax.stop_gradient(x)
        return jax.lax.pmax(x, self.tensor_axes) if self.tensor > 1 else x

    def tensor_offset(self, n: int) -> Any:
        """Return the number of the first of this device's n, of what is split over `tensor`."""
        return _offset(self.tensor_axes, n)

    def sequence_offset(self, T: int) -> Any:
        """Return the first of this device's T positions, outside of the tensor regions."""
        axes = self.sequence_axes
        return _offset((*axes, *self.tensor_axes) if self.sequence_parallel else axes, T)

    def layer_offset(self, L: int) -> Any:
        """Return the number of the first of this device's L layers."""
        return _offset(self.layer_axes, L)

    def local_positions(self, positions_T: jax.Array) -> jax.Array:
        """Return this device's part of the positions (..., T), outside of the tensor regions."""
        if not self.sequence_parallel:
            return positions_T
        T = positions_T.shape[-1] // self.tensor
        return jax.lax.dynamic_slice_in_dim(positions_T, self.tensor_offset(T), T, axis=-1)

    def local_vocab_shard(self, w_VD: jax.Array, V: int) -> tuple[jax.Array, Any]:
        """Return this device's rows of a table of V, and the number of the first of them."""
        if w_VD.shape[0] == V and self.tensor > 1:  # stored whole, as `tensor` does not divide V
            rows = -(-V // self.tensor)
            w_VD = jnp.pad(w_VD, ((0, rows * self.tensor - V), (0, 0)))
            w_VD = jax.lax.dynamic_slice_in_dim(w_VD, self.tensor_offset(rows), rows)
        return w_VD, self.tensor_offset(w_VD.shape[0])


def _offset(axes: tuple[str, ...], n: int) -> Any:
    """Return the number of this device's first element, if each device along `axes` has n."""
    return jax.lax.axis_index(axes) * n if axes else 0


NO_PARALLELISM = ParallelContext()
