"""Reduce-scatter and all-gather, each the backward pass of the other, with or without Gloo."""

import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxgpt.parallel.mesh import mesh_axes_with

MeshAxes = str | tuple[str, ...]  # of one or of several axes of the mesh, the first outermost


def reduce_scatter(x: jax.Array, axis: MeshAxes, dimension: int) -> jax.Array:
    """Return this device's part, along `dimension`, of the sum of `x` over a mesh axis.

    `jax.lax.psum_scatter`, but between the CPUs of several processes an all-to-all and a sum of
    what arrives, the same traffic: with JAX 0.10 and 0.11 Gloo's own reduce-scatter mixes up large
    arrays without a word (jax-ml/jax issue 40830), and gives up after 30 s (40831).
    """
    if jax.default_backend() != "cpu" or not jax.distributed.is_initialized():
        return jax.lax.psum_scatter(x, axis, scatter_dimension=dimension, tiled=True)
    return _all_to_all_sum(x, axis, dimension)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def all_gather(x: jax.Array, axis: MeshAxes, dimension: int) -> jax.Array:
    """Return all parts of `x` over a mesh axis; its backward pass is `reduce_scatter`."""
    return jax.lax.all_gather(x, axis, axis=dimension, tiled=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _all_to_all_sum(x: jax.Array, axis: MeshAxes, dimension: int) -> jax.Array:
    n = jax.lax.axis_size(axis)
    before, after = x.shape[:dimension], x.shape[dimension + 1 :]
    parts = x.reshape(*before, n, x.shape[dimension] // n, *after)
    return jax.lax.all_to_all(parts, axis, dimension, 0).sum(0)


all_gather.defvjp(
    lambda x, axis, dimension: (jax.lax.all_gather(x, axis, axis=dimension, tiled=True), None),
    lambda axis, dimension, _, gradient: (reduce_scatter(gradient, axis, dimension),),
)
_all_to_all_sum.defvjp(
    lambda x, axis, dimension: (_all_to_all_sum(x, axis, dimension), None),
    lambda axis, dimension, _, gradient: (all_gather(gradient, axis, dimension),),
)


def gather_batch(own: jax.Array, mesh: Mesh) -> jax.Array:
    """Return a value of each row (B,) or token (B, T) of a batch, given this device's values.

    A device's value of a row is the sum over its tokens of the row.
    """
    rows, positions = (mesh_axes_with(role, mesh) for role in ("splits_batch", "splits_sequence"))
    over = (*rows, *positions)
    if not over:
        return own
    shape, start = [], []
    for n, axes in zip(own.shape, (rows, positions), strict=False):
        shape.append(n * math.prod(mesh.shape[axis] for axis in axes))
        start.append(jax.lax.axis_index(axes) * n if axes else 0)
    zeros = varying(jnp.zeros(shape, own.dtype), frozenset(over))
    # The sum of one device's value and zeros is exact.
    return jax.lax.psum(jax.lax.dynamic_update_slice(zeros, own, start), over)


def varying(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    """Return `x`, the same along `axes` so far, as something that may differ there."""
    return jax.lax.pcast(x, tuple(sorted(axes)), to="varying") if axes else x
