"""Collectives for use inside `jax.shard_map`, with a workaround for Gloo's reduce-scatter."""

import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxgpt.parallel.mesh import mesh_axes_with

MeshAxes = str | tuple[str, ...]  # one or more mesh axes, outermost first


def reduce_scatter(x: jax.Array, axis: MeshAxes, dimension: int) -> jax.Array:
    """Sum `x` over the mesh axis, and return this device's shard of the sum along `dimension`.

    `dimension` must not be negative. Its size must be divisible by the number of devices along the
    mesh axis. The backward pass is `all_gather`.

    On CPUs with `jax.distributed`, an all-to-all and a local sum replace `jax.lax.psum_scatter`.
    This sends the same number of bytes. With JAX 0.10 and 0.11, Gloo's reduce-scatter silently
    corrupts large arrays (jax-ml/jax issue 40830) and times out after 30 s (issue 40831).
    """
    if jax.default_backend() != "cpu" or not jax.distributed.is_initialized():
        return jax.lax.psum_scatter(x, axis, scatter_dimension=dimension, tiled=True)
    return _all_to_all_sum(x, axis, dimension)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def all_gather(x: jax.Array, axis: MeshAxes, dimension: int) -> jax.Array:
    """Gather the shards `x` over the mesh axis, and concatenate them along `dimension`.

    `dimension` must not be negative. The backward pass is `reduce_scatter`.
    """
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


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def average_gradient(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Return `x`, which is replicated along the mesh axes.

    The backward pass averages the gradient over the axes. Devices may have computed it in different
    orders, so that their results differ by rounding. The average is the same on all of them.
    """
    return x


average_gradient.defvjp(
    lambda x, axes: (x, None),
    lambda axes, _, gradient: (jax.lax.pmean(varying(gradient, frozenset(axes)), axes),),
)


def gather_batch(own: jax.Array, mesh: Mesh) -> jax.Array:
    """Return the values of the global batch, on every device.

    Args:
        own: this device's values: (B,), (B, T), or logits (B, T, V), which are also gathered over
            the vocabulary. If the sequence is split, values (B,) are partial sums over positions,
            and this function adds them.
    """
    roles = ("splits_batch", "splits_sequence", "splits_heads")  # for the dims B, T and V
    rows, positions, vocabulary = (mesh_axes_with(role, mesh) for role in roles)
    over = (*rows, *positions, *(vocabulary if own.ndim == len(roles) else ()))
    if not over:
        return own
    shape, start = [], []
    for n, axes in zip(own.shape, (rows, positions, vocabulary), strict=False):
        shape.append(n * math.prod(mesh.shape[axis] for axis in axes))
        start.append(jax.lax.axis_index(axes) * n if axes else 0)
    zeros = varying(jnp.zeros(shape, own.dtype), frozenset(over))
    # If the sequence is not split, each sum has only one nonzero term and is therefore exact.
    return jax.lax.psum(jax.lax.dynamic_update_slice(zeros, own, start), over)


def varying(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    """Mark `x`, which is replicated along `axes`, as varying along `axes` (for `shard_map`)."""
    return jax.lax.pcast(x, tuple(sorted(axes)), to="varying") if axes else x
