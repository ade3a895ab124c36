"""Offloading to host memory. Arrays are copied to the device one layer at a time."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

HOST = jax.memory.Space.Host


def is_in_host(x: jax.Array) -> bool:
    return jax.typeof(x).memory_space == HOST


def to_device(x: jax.Array) -> jax.Array:
    """Move an array to device memory if it is in host memory."""
    return jax.device_put(x, jax.memory.Space.Device) if is_in_host(x) else x


def to_host(tree: Any) -> Any:
    """Move arrays to host memory."""
    return jax.device_put(tree, HOST)


def layerwise_replace(change: Callable[..., Any], old: Any, given: Any) -> Any:
    """Compute `change(old, given)` one layer at a time.

    Args:
        change: function of one layer's `old` and `given`, arrays (1, ...) on the device. It returns
            the new arrays (1, ...).
        old: arrays (L, ...) to replace. The results have the same shapes and memory kinds.
        given: further arrays (L, ...), such as gradients.
    """

    def one(stacks: Any, i: jax.Array) -> tuple[Any, None]:
        # Without the barriers, XLA would reread the old arrays for each new array, and would
        # therefore copy all of them.
        own = jax.lax.optimization_barrier((layer(stacks, i), layer(given, i)))
        new = jax.lax.optimization_barrier(change(*own))

        def put(stack: jax.Array, part: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice_in_dim(stack, match_memory(part, stack), i, 0)

        return jax.tree.map(put, stacks, new), None

    return jax.lax.scan(one, old, jnp.arange(len(jax.tree.leaves(old)[0])))[0]


def layer(stacks: Any, i: jax.Array) -> Any:
    """Return the slices (1, ...) of layer `i`, on the device."""
    return jax.tree.map(lambda stack: to_device(jax.lax.dynamic_slice_in_dim(stack, i, 1)), stacks)


def match_memory(x: jax.Array, like: jax.Array) -> jax.Array:
    """Move `x` to host memory if `like` is there."""
    return to_host(x) if is_in_host(like) else x


def stacked_in_host(
    make_block: Callable[[jax.Array], nnx.Module],
) -> Callable[[jax.Array], nnx.Module]:
    """Return a function that makes stacked blocks in host memory, one at a time.

    Args:
        make_block: makes one block from one key; the returned function takes L keys.
    """

    def make_blocks(keys: jax.Array) -> nnx.Module:
        graph = nnx.graphdef(nnx.eval_shape(make_block, keys[0]))
        return nnx.merge(graph, jax.lax.map(lambda key: to_host(nnx.state(make_block(key))), keys))

    return make_blocks
