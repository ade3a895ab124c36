"""Tensor and sequence parallelism, with the explicit collectives that the layers call.

A step is one program, which `jax.shard_map` runs on every device's shards. `shard_map` tracks the
mesh axes along which each value varies, and derives the backward pass's communication from them:
the transpose of a psum is a pcast to varying, and vice versa.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxgpt.kernels.linear import matmul, matmul_parts
from jaxgpt.parallel.collectives import all_gather, average_gradient, reduce_scatter
from jaxgpt.parallel.zero import ShardedParam, all_gather_param


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelContext:
    """Settings that describe how the model is split over devices.

    By default, each device has the whole model. Megatron's tensor parallelism (arXiv 1909.08053)
    splits heads, the MLP and the vocabulary over `tensor`. Outside these tensor-parallel regions,
    sequence parallelism (arXiv 2205.05198) splits positions over the same devices.
    """

    tensor: int = 1  # number of devices that split the heads
    tensor_axes: tuple[str, ...] = ()  # mesh axes of size > 1 that split the heads
    sequence_axes: tuple[str, ...] = ()  # mesh axes of size > 1 that split each sequence
    sequence_parallel: bool = False
    regather_in_backward: bool = False
    """Gather weights and activations again in the backward pass, instead of keeping the gathered
    arrays of all layers in memory."""
    on_cpu: bool = False  # whether the devices are CPUs; if so, no layout constraints are used
    matmul: Callable[[jax.Array, jax.Array, int], jax.Array] = matmul
    """Kernel of the linear layers, such as `kernels.linear.matmul`."""

    def param(self, param: jax.Array | ShardedParam) -> jax.Array:
        """Apply `all_gather_param` to a `ShardedParam`, or return an array unchanged."""
        return all_gather_param(param) if isinstance(param, ShardedParam) else param

    def column_parallel_matmul(self, x: jax.Array, kernel: Any, n: int) -> jax.Array:
        """Return this device's part of x W, in x's dtype.

        With sequence parallelism, x (B, T, ...) is first all-gathered over T.

        Args:
            kernel: this device's part of W, as an array or a `ShardedParam`.
            n: number of dims to contract: the last n dims of x and the first n dims of W.
        """
        ((y,),) = self.column_parallel_matmuls(x, (kernel,), n, (False,))
        return y

    def column_parallel_matmuls(
        self, x: jax.Array, kernels: Sequence[Any], n: int, splits: Sequence[bool]
    ) -> tuple[tuple[jax.Array, ...], ...]:
        """Return the result of `column_parallel_matmul` for each kernel, as a tuple of arrays.

        x, and in the backward pass its gradient, is communicated only once.

        Args:
            splits: whether to split each product along its first output dim, as `matmul_parts`
                does. The tuple of a product that is not split has one array.
        """

        def product(x: jax.Array, kernel: Any, split: bool) -> tuple[jax.Array, ...]:
            w = self.param(kernel).astype(x.dtype)
            if split and self.matmul is matmul:
                return matmul_parts(x, w, n)
            y = self.matmul(x, w, n)
            if not split:
                return (y,)
            # Split instead of indexing, because the gradient of indexing sums zero-padded arrays.
            axis = x.ndim - n
            return tuple(part.squeeze(axis) for part in jnp.split(y, y.shape[axis], axis))

        def multiply(x: jax.Array, kernels: tuple[Any, ...]) -> tuple[tuple[jax.Array, ...], ...]:
            x = self.copy_to_tensor_region(x)
            return tuple(product(x, *one) for one in zip(kernels, splits, strict=True))

        multiply = jax.checkpoint(multiply) if self.regather_in_backward else multiply
        return multiply(x, tuple(kernels))

    def row_parallel_matmul(self, x: jax.Array, kernel: Any, n: int) -> jax.Array:
        """Return x W, in x's dtype, where the input dims of x and W are split over `tensor`.

        Partial products are all-reduced over `tensor`, or reduce-scattered over T with sequence
        parallelism. `kernel` and `n` are as in `column_parallel_matmul`.
        """

        def multiply(x: jax.Array, kernel: Any) -> jax.Array:
            return self.matmul(x, self.param(kernel).astype(x.dtype), n)

        multiply = jax.checkpoint(multiply) if self.regather_in_backward else multiply
        return self.reduce_from_tensor_region(multiply(x, kernel))

    def copy_to_tensor_region(self, x_BTD: jax.Array) -> jax.Array:
        """Enter a tensor-parallel region before a column-parallel weight (Megatron-LM's `f`).

        With sequence parallelism, x is all-gathered over T. Without it, x is returned unchanged,
        and the backward pass sums its gradient over `tensor`.
        """
        if self.tensor == 1:
            return x_BTD
        if self.sequence_parallel:
            return all_gather(x_BTD, self.tensor_axes, 1)
        return jax.lax.pcast(x_BTD, self.tensor_axes, to="varying")

    def reduce_from_tensor_region(self, x_BTD: jax.Array) -> jax.Array:
        """Leave a tensor-parallel region after a row-parallel weight (Megatron-LM's `g`).

        Partial sums are all-reduced, or reduce-scattered over T with sequence parallelism.
        """
        if self.tensor == 1:
            return x_BTD
        if self.sequence_parallel:
            return reduce_scatter(x_BTD, self.tensor_axes, 1)
        return jax.lax.psum(x_BTD, self.tensor_axes)

    def psum(self, x: Any) -> Any:
        """Sum each array of a pytree over the mesh axis `tensor`."""
        return jax.lax.psum(x, self.tensor_axes) if self.tensor > 1 else x

    def pmax(self, x: jax.Array) -> jax.Array:
        """Return the elementwise maximum over `tensor`. The result has no gradient."""
        x = jax.lax.stop_gradient(x)
        return jax.lax.pmax(x, self.tensor_axes) if self.tensor > 1 else x

    def tensor_offset(self, n: int) -> Any:
        """Return the offset of this device's shard if each `tensor` rank has n elements."""
        return _offset(self.tensor_axes, n)

    def sequence_offset(self, T: int) -> Any:
        """Return the first of this device's T positions outside tensor-parallel regions.

        The zigzag layout of ring attention is not supported, because a device's positions are then
        not consecutive.
        """
        axes = self.sequence_axes
        return _offset((*axes, *self.tensor_axes) if self.sequence_parallel else axes, T)

    def local_positions(self, positions_T: jax.Array) -> jax.Array:
        """Return this device's positions outside tensor-parallel regions.

        With sequence parallelism, this is a slice (..., T / tensor) of `positions_T` (..., T).
        Otherwise, it is `positions_T`.
        """
        if not self.sequence_parallel:
            return positions_T
        T = positions_T.shape[-1] // self.tensor
        return jax.lax.dynamic_slice_in_dim(positions_T, self.tensor_offset(T), T, axis=-1)

    def keep_replicated(self, w: jax.Array) -> jax.Array:
        """Return `w`, a weight that is replicated over `tensor`, with a replicated gradient.

        Without sequence parallelism, each rank computes the whole gradient. GPUs add rows with the
        same index in a varying order, so the results can differ by rounding. They are averaged over
        `tensor`, because otherwise the replicas of the weight would drift apart.
        """
        if self.tensor == 1 or self.sequence_parallel:
            return w
        return average_gradient(w, self.tensor_axes)

    def local_vocab_shard(self, w_VD: jax.Array, V: int) -> tuple[jax.Array, Any]:
        """Return this device's rows of an embedding table, and the token ID of the first row.

        If the table is replicated because `tensor` does not divide V, it is padded with zeros and
        split into equal shards.

        Args:
            w_VD: this device's shard of the table, or the whole table if it is replicated.
            V: number of rows in the whole table.
        """
        if w_VD.shape[0] == V and self.tensor > 1:  # replicated, because `tensor` does not divide V
            rows = -(-V // self.tensor)
            w_VD = jnp.pad(w_VD, ((0, rows * self.tensor - V), (0, 0)))
            w_VD = jax.lax.dynamic_slice_in_dim(w_VD, self.tensor_offset(rows), rows)
        return w_VD, self.tensor_offset(w_VD.shape[0])


def _offset(axes: tuple[str, ...], n: int) -> Any:
    """Return the offset of this device's shard if each device along `axes` has n elements."""
    return jax.lax.axis_index(axes) * n if axes else 0


NO_PARALLELISM = ParallelContext()
