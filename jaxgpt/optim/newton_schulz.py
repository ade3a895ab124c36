"""Newton-Schulz orthogonalization of many matrices, distributed over the devices of a mesh."""

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxgpt.models.weights import Weight
from jaxgpt.optim.parameters import Parameters
from jaxgpt.parallel.sharding import Params

# From github.com/KellerJordan/Muon: a quintic polynomial that is steep at 0.
STEPS = 5
COEFFICIENTS = 3.4445, -4.7750, 2.0315
EPSILON = 1e-7


class StackSpec(NamedTuple):
    """Size and sharding of the matrices in a stack. No matrix has more rows than columns."""

    sizes: tuple[int, int]  # number of rows and number of columns of a full matrix
    axes: tuple[tuple[str, ...], tuple[str, ...]]  # mesh axes that shard rows and columns
    stack_axes: tuple[str, ...]  # mesh axes that shard the stack


class View(NamedTuple):
    """A weight viewed as a stack of matrices."""

    stack_spec: StackSpec
    order: tuple[int, ...]  # the weight's dimensions, ordered as stack, rows, columns
    n_stacked: int  # number of stacked dimensions
    n_first: int  # number of dimensions that form the rows
    n_matrices: int  # number of matrices in the full weight

    def stack(self, x: jax.Array) -> jax.Array:
        """Reshape this device's shard of a weight to (matrices, rows, columns)."""
        x = x.transpose(self.order)
        n, m = self.n_stacked, self.n_stacked + self.n_first
        return x.reshape(*(math.prod(s) for s in (x.shape[:n], x.shape[n:m], x.shape[m:])))

    def unstack(self, stacked: jax.Array, like: jax.Array) -> jax.Array:
        """Undo `stack`: return the stacked matrices as an array with the shape of `like`."""
        x = stacked.reshape([like.shape[i] for i in self.order])
        return x.transpose([self.order.index(i) for i in range(like.ndim)])


def orthogonalize(updates: Params, parameters: Parameters) -> Params:
    """Return `updates` with each matrix orthogonalized by `newton_schulz`.

    `parameters` describes the weights to update. Its shardings must not name mesh axes of size 1.
    Matrices with the same `StackSpec` are stacked across weights and layers, and each device of the
    mesh processes an equal share of the stack. If the matrices are sharded, one all-to-all gives
    each device the full matrices of its share, and another returns the results to their shards. If
    the matrices are replicated, an all-gather copies the results to all replicas. The stack is
    padded to a multiple of the number of devices. On a mesh of accelerators, the computation is in
    bfloat16, as in Keller Jordan's code. On CPUs or without a mesh, it is in float32. The results
    have the dtype of `updates`.
    """
    arrays, tree = jax.tree.flatten(updates)
    mesh, (views, mesh_shape) = parameters.mesh, _views(parameters)
    on_cpu = mesh is None or mesh.devices.flat[0].platform == "cpu"
    compute = functools.partial(
        _orthogonalize_shards,
        views,
        mesh_shape,
        jnp.float32 if on_cpu else jnp.bfloat16,
    )
    if mesh_shape:  # check_vma cannot infer that an all-gather replicates its result
        specs = [sharding.spec for sharding in jax.tree.leaves(parameters.shardings)]
        compute = jax.shard_map(
            compute, mesh=mesh, in_specs=(specs,), out_specs=specs, check_vma=False
        )
    return tree.unflatten(compute(arrays))


def view(weight: Weight, spec: PartitionSpec) -> View:
    """Return the view of a weight, given its sharding `spec`.

    The view may transpose a matrix and permute its rows and columns. Orthogonalization commutes
    with transposition and permutation, and `View.unstack` undoes them.
    """
    spec = (*spec, *[None] * (len(weight.shape) - len(spec)))

    def side(dims: tuple[int, ...]) -> tuple[int, tuple[str, ...], tuple[int, ...]]:
        axes = [spec[i] if isinstance(spec[i], tuple) else (spec[i],) for i in dims if spec[i]]
        return math.prod(weight.shape[i] for i in dims), sum(axes, ()), dims

    stacked, *sides = map(side, weight.matrix_dims)
    first, second = sorted(sides, key=lambda side: side[:2])
    stack_spec = StackSpec((first[0], second[0]), (first[1], second[1]), stacked[1])
    order = stacked[2] + first[2] + second[2]
    return View(stack_spec, order, len(stacked[2]), len(first[2]), stacked[0])


def newton_schulz(x_NRC: jax.Array) -> jax.Array:
    """Bring the singular values of N matrices (N, R, C) close to 1. If R > C, this wastes FLOPs.

    Singular values above 0.2% of (Frobenius norm + 1e-7) end up between 0.68 and 1.21, up to
    rounding. A zero matrix stays zero. If the square of the norm overflows float32, the result is
    0, or NaN if an element is infinite. The result has the dtype of `x_NRC`.
    """
    a, b, c = COEFFICIENTS
    norm = jnp.sqrt(jnp.square(x_NRC.astype(jnp.float32)).sum((1, 2), keepdims=True))
    x_NRC = (x_NRC / (norm + EPSILON)).astype(x_NRC.dtype)
    for _ in range(STEPS):
        gram_NRR = x_NRC @ x_NRC.mT
        x_NRC = a * x_NRC + (b * gram_NRR + c * gram_NRR @ gram_NRR) @ x_NRC
    return x_NRC


def newton_schulz_flops(parameters: Parameters) -> int:
    """Return the FLOPs that `orthogonalize` spends on matmuls on each device."""
    views, mesh_shape = _views(parameters)
    flops = 0
    for stack_spec, members in _group_by_spec(views).items():
        R, C = stack_spec.sizes
        n_split = _n_devices(stack_spec.stack_axes, mesh_shape)
        N = sum(views[i].n_matrices for i in members) // n_split
        n_own = -(-N // (math.prod(mesh_shape.values()) // n_split))
        flops += n_own * STEPS * (4 * R**2 * C + 2 * R**3)
    return flops


def _views(parameters: Parameters) -> tuple[list[View], dict[str, int]]:
    """Return the view of each weight, and the sizes of the mesh axes that are larger than 1."""
    weights = jax.tree.leaves(parameters.weights)
    if parameters.mesh is None:
        return [view(weight, PartitionSpec()) for weight in weights], {}
    specs = [sharding.spec for sharding in jax.tree.leaves(parameters.shardings)]
    mesh_shape = {axis: n for axis, n in parameters.mesh.shape.items() if n > 1}
    return list(map(view, weights, specs)), mesh_shape


def _group_by_spec(views: list[View]) -> dict[StackSpec, list[int]]:
    """Map each `StackSpec` to the indices of its views."""
    members = defaultdict(list)
    for i, one in enumerate(views):
        members[one.stack_spec].append(i)
    return members


def _n_devices(axes: tuple[str, ...], mesh_shape: Mapping[str, int]) -> int:
    return math.prod(mesh_shape[axis] for axis in axes)


# The functions below run on each device, inside `jax.shard_map`.


def _orthogonalize_shards(
    views: list[View], mesh_shape: Mapping[str, int], dtype: jnp.dtype, arrays: list[jax.Array]
) -> list[jax.Array]:
    """Orthogonalize all weights, given this device's shards. Return the new shards."""
    out = list(arrays)
    for stack_spec, numbers in _group_by_spec(views).items():
        stacks = [views[i].stack(arrays[i]) for i in numbers]
        done = _distribute(jnp.concatenate(stacks).astype(dtype), stack_spec, mesh_shape)
        ends = list(itertools.accumulate(len(stack) for stack in stacks))
        for i, part in zip(numbers, jnp.split(done, ends[:-1]), strict=True):
            out[i] = views[i].unstack(part.astype(arrays[i].dtype), arrays[i])
    return out


def _distribute(
    shards_NRC: jax.Array, stack_spec: StackSpec, mesh_shape: Mapping[str, int]
) -> jax.Array:
    """Orthogonalize N matrices, given this device's shards (N, R, C). Return the new shards."""
    split_over = sum(stack_spec.axes, ())
    copied_over = tuple(a for a in mesh_shape if a not in split_over + stack_spec.stack_axes)
    n_shards, n_copies = (_n_devices(axes, mesh_shape) for axes in (split_over, copied_over))
    N, R, C = shards_NRC.shape
    n_own = -(-N // (n_shards * n_copies))
    x = jnp.pad(shards_NRC, ((0, n_own * n_shards * n_copies - N), (0, 0), (0, 0)))
    if copied_over:
        start = jax.lax.axis_index(copied_over) * n_own * n_shards
        x = jax.lax.dynamic_slice_in_dim(x, start, n_own * n_shards)
    first, second = (_n_devices(axes, mesh_shape) for axes in stack_spec.axes)
    if split_over:
        x = jax.lax.all_to_all(x.reshape(n_shards, n_own, R, C), split_over, 0, 0)
        x = x.reshape(first, second, n_own, R, C).transpose(2, 0, 3, 1, 4)
    x = newton_schulz(x.reshape(n_own, first * R, second * C))
    if split_over:
        x = x.reshape(n_own, first, R, second, C).transpose(1, 3, 0, 2, 4)
        x = jax.lax.all_to_all(x.reshape(n_shards, n_own, R, C), split_over, 0, 0)
    x = x.reshape(n_shards * n_own, R, C)
    if copied_over:
        x = jax.lax.all_gather(x, copied_over, tiled=True)
    return x[:N]
