"""Offloading: what lies in the host's memory comes to a device one layer at a time."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

HOST = jax.memory.Space.Host


def is_in_host(x: jax.Array) -> bool:
    return jax.typeof(x).memory_space == HOST


def to_device(x: jax.Array) -> jax.Array:
    """Return an array in the device's memory."""
    return jax.device_put(x, jax.memory.Space.Device) if is_in_host(x) else x


def to_host(tree: Any) -> Any:
    """Return arrays in the host's memory."""
    return jax.device_put(tree, HOST)


def replace_in_turn(change: Callable[..., Any], old: Any, given: Any) -> Any:
    """Return `change(old, given)`, computed one layer after the other, where `old` lies.

    All arrays are stacked over layers; `change` gets stacks of one layer, on the device.
    """

    def one(stacks: Any, i: jax.Array) -> tuple[Any, None]:
        # Barriers: or XLA reads old stacks again for each new one, and copies them all to do so.
        own = jax.lax.optimization_barrier((layer(stacks, i), layer(given, i)))
        new = jax.lax.optimization_barrier(change(*own))

        def put(stack: jax.Array, part: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice_in_dim(stack, placed_as(part, stack), i, 0)

        return jax.tree.map(put, stacks, new), None

    return jax.lax.scan(one, old, jnp.arange(len(jax.tree.leaves(old)[0])))[0]


def layer(stacks: Any, i: jax.Array) -> Any:
    """Return the stacks of layer `i` alone, on the device."""
    return jax.tree.map(lambda stack: to_device(jax.lax.dynamic_slice_in_dim(stack, i, 1)), stacks)


def placed_as(x: jax.Array, like: jax.Array) -> jax.Array:
    """Return an array in the memory that another one is in."""
    return to_host(x) if is_in_host(like) else x


def stacked_in_host(
    make_block: Callable[[jax.Array], nnx.Module],
) -> Callable[[jax.Array], nnx.Module]:
    """Return the same for many keys: each block goes to the host's memory before the next."""

    def make_blocks(keys: jax.Array) -> nnx.Module:
        graph = nnx.graphdef(nnx.eval_shape(make_block, keys[0]))
        return nnx.merge(graph, jax.lax.map(lambda key: to_host(nnx.state(make_block(key))), keys))

    return make_blocks
