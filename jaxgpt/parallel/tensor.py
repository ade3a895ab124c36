"""Tensor and sequence parallelism, written out: what a model asks of the devices around it.

A step is one program that every device runs on its own part of everything (`jax.shard_map` over
the whole mesh). This is Megatron's tensor parallelism (arXiv 1909.08053) and sequence parallelism
(arXiv 2205.05198); `parallel.zero` has what the ZeRO stages do with weights and gradients.

`shard_map` tracks over which mesh axes a value varies between devices, and derives the backward
pass from that: the transpose of a sum over devices is a copy to each, and of a copy a sum.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxgpt.kernels.linear import matmul
from jaxgpt.parallel.collectives import all_gather, reduce_scatter
from jaxgpt.parallel.sharding import TENSOR
from jaxgpt.parallel.zero import ShardedParam, all_gather_param


class ParallelContext:
    """What a model asks of the devices around it; here there are none."""

    on_cpu: bool = False
    """Whether the program is written as CPUs compute it fastest."""

    def param(self, param: Any) -> jax.Array:
        """Return a parameter ready for use."""
        return param

    def column_parallel_matmul(self, x: jax.Array, kernel: Any, n: int) -> jax.Array:
        """Return x W, summed over the last n dims of x; the outputs of W are split."""
        return matmul(x, kernel.astype(x.dtype), n)

    def row_parallel_matmul(self, x: jax.Array, kernel: Any, n: int) -> jax.Array:
        """Return x W, summed over the last n dims of x; x and the inputs of W are split."""
        return matmul(x, kernel.astype(x.dtype), n)

    def local_vocab_shard(self, w_VD: jax.Array, V: int) -> tuple[jax.Array, Any]:
        """Return this device's rows of a table of V, and the number of the first of them."""
        return w_VD, 0

    def tensor_offset(self, n: int) -> Any:
        """Return the number of the first of this device's n, of what is split over `tensor`."""
        return 0

    def sequence_offset(self, T: int) -> Any:
        """Return the first of this device's T positions, outside of the tensor regions."""
        return 0

    def local_sequence_length(self, T: int) -> int:
        """Return how many of T positions this device has outside of the tensor regions."""
        return T

    def copy_to_tensor_region(self, x_BTD: jax.Array) -> jax.Array:
        """Go before weights that are split by columns (`f` in Megatron's figure 3)."""
        return x_BTD

    def reduce_from_tensor_region(self, x_BTD: jax.Array) -> jax.Array:
        """Go after weights that are split by rows (`g`): partial results become their sum."""
        return x_BTD

    def sum(self, x: Any) -> Any:
        """Return the sum over devices along `tensor`."""
        return x

    def max(self, x: jax.Array) -> jax.Array:
        """Return the maximum over devices along `tensor`; not differentiated."""
        return x


NO_PARALLELISM = ParallelContext()


@dataclasses.dataclass(frozen=True)
class ShardMapContext(ParallelContext):
    """The same inside `shard_map`, for a device of a mesh."""

    tensor: int
    """Number of devices along `tensor`."""
    sequence_parallel: bool
    dtype: jnp.dtype
    """Of the computation. Weights travel in it."""
    on_cpu: bool = False
    regather_in_backward: bool = False
    """Gather a layer's weights and activations once more for its backward pass, in place of
    keeping them whole for all layers until then."""

    def param(self, param: ShardedParam) -> jax.Array:
        return all_gather_param(param.shard, param.grad_slot, param.layout, self.dtype)

    def column_parallel_matmul(self, x: jax.Array, kernel: ShardedParam, n: int) -> jax.Array:
        def multiply(x: jax.Array, kernel: ShardedParam) -> jax.Array:
            return matmul(self.copy_to_tensor_region(x), self.param(kernel), n)

        return (jax.checkpoint(multiply) if self.regather_in_backward else multiply)(x, kernel)

    def row_parallel_matmul(self, x: jax.Array, kernel: ShardedParam, n: int) -> jax.Array:
        def multiply(x: jax.Array, kernel: ShardedParam) -> jax.Array:
            return matmul(x, self.param(kernel), n)

        multiply = jax.checkpoint(multiply) if self.regather_in_backward else multiply
        return self.reduce_from_tensor_region(multiply(x, kernel))

    def local_vocab_shard(self, w_VD: jax.Array, V: int) -> tuple[jax.Array, Any]:
        if w_VD.shape[0] == V and self.tensor > 1:  # stored whole, because tensor divides it not
            rows = -(-V // self.tensor)
            w_VD = jnp.pad(w_VD, ((0, rows * self.tensor - V), (0, 0)))
            w_VD = jax.lax.dynamic_slice_in_dim(w_VD, self.tensor_offset(rows), rows)
        return w_VD, self.tensor_offset(w_VD.shape[0])

    def tensor_offset(self, n: int) -> Any:
        return jax.lax.axis_index(TENSOR) * n if self.tensor > 1 else 0

    def sequence_offset(self, T: int) -> Any:
        return self.tensor_offset(T) if self.sequence_parallel else 0

    def local_sequence_length(self, T: int) -> int:
        return T // self.tensor if self.sequence_parallel else T

    def copy_to_tensor_region(self, x_BTD: jax.Array) -> jax.Array:
        if self.tensor == 1:
            return x_BTD
        if self.sequence_parallel:
            return all_gather(x_BTD, TENSOR, 1)
        return jax.lax.pcast(x_BTD, TENSOR, to="varying")

    def reduce_from_tensor_region(self, x_BTD: jax.Array) -> jax.Array:
        if self.tensor == 1:
            return x_BTD
        if self.sequence_parallel:
            return reduce_scatter(x_BTD, TENSOR, 1)
        return jax.lax.psum(x_BTD, TENSOR)

    def sum(self, x: Any) -> Any:
        return jax.lax.psum(x, TENSOR) if self.tensor > 1 else x

    def max(self, x: jax.Array) -> jax.Array:
        x = jax.lax.stop_gradient(x)
        return jax.lax.pmax(x, TENSOR) if self.tensor > 1 else x
