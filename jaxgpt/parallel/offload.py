"""Offloading to host memory (memory kind `pinned_host`), one layer at a time."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

HOST = jax.memory.Space.Host


def is_in_host(x: jax.Array) -> bool:
    return jax.typeof(x).memory_space == HOST


def to_device(x: jax.Array) -> jax.Array:
    """Move an array from host memory to device memory; return other arrays unchanged."""
    return jax.device_put(x, jax.memory.Space.Device) if is_in_host(x) else x


def to_host(tree: Any) -> Any:
    """Move all arrays in a tree to host memory."""
    return jax.device_put(tree, HOST)


def layerwise_replace(change: Callable[..., Any], old: Any, given: Any) -> Any:
    """Compute `change(old, given)` one layer at a time.

    Args:
        change: function that takes one layer of `old` and one layer of `given`, as arrays (1, ...)
            on the device. It returns the new arrays (1, ...), with the tree structure and dtypes of
            `old`.
        old: tree of at least one array (L, ...).
        given: tree of other arrays (L, ...), such as gradients.

    Returns:
        The new arrays (L, ...). XLA can store them in the buffers of the old arrays.
    """

    def one(stacks: Any, i: jax.Array) -> tuple[Any, None]:
        # Without the barriers, XLA would read the old arrays again for each new array, and would
        # therefore copy all old arrays.
        own = jax.lax.optimization_barrier((layer(stacks, i), layer(given, i)))
        new = jax.lax.optimization_barrier(change(*own))

        def put(stack: jax.Array, part: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice_in_dim(stack, match_memory(part, stack), i, 0)

        return jax.tree.map(put, stacks, new), None

    return jax.lax.scan(one, old, jnp.arange(len(jax.tree.leaves(old)[0])))[0]


def layer(stacks: Any, i: jax.Array) -> Any:
    """Return layer `i` of arrays (L, ...), as arrays (1, ...) on the device."""
    return jax.tree.map(lambda stack: to_device(jax.lax.dynamic_slice_in_dim(stack, i, 1)), stacks)


def match_memory(x: jax.Array, like: jax.Array) -> jax.Array:
    """Move `x` to host memory if `like` is in host memory. Otherwise, return `x` unchanged."""
    return to_host(x) if is_in_host(like) else x


def stacked_in_host(
    make_block: Callable[[jax.Array], nnx.Module],
) -> Callable[[jax.Array], nnx.Module]:
    """Return a function that takes L keys, and makes L stacked blocks in host memory.

    It generates one block at a time on the device.

    Args:
        make_block: function that makes one block from one key.
    """

    def make_blocks(keys: jax.Array) -> nnx.Module:
        graph = nnx.graphdef(nnx.eval_shape(make_block, keys[0]))
        return nnx.merge(graph, jax.lax.map(lambda key: to_host(nnx.state(make_block(key))), keys))

    return make_blocks
