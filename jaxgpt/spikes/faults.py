"""Fault injection: NaN gradients and flipped bits, for testing how a run handles them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxgpt.config import Config, UsageError
from jaxgpt.parallel.mesh import mesh_axes_with


def inject_nan(config: Config, loss: jax.Array, mesh: Mesh, step: jax.Array) -> jax.Array:
    """Return the loss, but replace it with NaN on faults.nan_device at faults.nan_step.

    All devices that process the same rows of the batch get NaN. The gradient norm is then also NaN
    if any target of these rows counts toward the loss. If faults.nan_step is not set, return `loss`
    itself. `loss` and `step` are scalars. Call this inside `jax.shard_map`.
    """
    faults = config.faults
    if faults.nan_step is None:
        return loss
    hit = step == faults.nan_step
    place = np.unravel_index(faults.nan_device, mesh.devices.shape)
    for axis, index in zip(mesh.axis_names, place, strict=True):
        if axis in mesh_axes_with("splits_batch", mesh):
            hit &= jax.lax.axis_index(axis) == index
    return loss * jnp.where(hit, jnp.nan, 1.0)


def with_bit_flip(train_step: Callable[..., Any], config: Config) -> Callable[..., Any]:
    """Wrap a train step so that it flips one bit of a parameter after step faults.bit_flip_step.

    If the same process repeats this step, the bit is not flipped again.

    `train_step` takes a state (with `params`), a step and other operands, and returns a state and
    metrics. If faults.bit_flip_step is not set, return `train_step` itself.
    """
    faults, flipped = config.faults, []

    def step_and_flip(state: Any, step: np.int32, *operands: Any) -> tuple[Any, Any]:
        state, metrics = train_step(state, step, *operands)
        if step == faults.bit_flip_step and not flipped:
            state = state._replace(params=flip_bit(state.params, faults.bit_flip_device))
            flipped.append(step)
        return state, metrics

    return train_step if faults.bit_flip_step is None else step_and_flip


def flip_bit(params: Any, device: int) -> Any:
    """Return the parameters with one bit flipped in one device's shard of the first array.

    `params` is a tree of float32 arrays, and `device` is an index into the flattened mesh. All
    processes must call this.
    """
    leaves, tree = jax.tree.flatten(params)
    array = leaves[0]
    hit = array.sharding.mesh.devices.flat[device]
    there = jax.sharding.SingleDeviceSharding(hit, memory_kind=array.sharding.memory_kind)

    def flipped(part: jax.Array) -> jax.Array:
        host = np.array(part)
        host.view(np.uint32).flat[0] ^= np.uint32(1 << 20)
        return jax.device_put(host, there)

    parts = [flipped(s.data) if s.device == hit else s.data for s in array.addressable_shards]
    leaves[0] = jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)
    return jax.tree.unflatten(tree, leaves)


def check_faults(config: Config, n_devices: int) -> None:
    """Raise a `UsageError` if the device of an injected fault does not exist."""
    faults = config.faults
    for name in ("nan", "bit_flip"):
        device = getattr(faults, f"{name}_device")
        if getattr(faults, f"{name}_step") is not None and device >= n_devices:
            raise UsageError(
                f"faults.{name}_device={device}: the mesh has {n_devices} devices; choose from 0 "
                f"to {n_devices - 1}"
            )


def describe_faults(config: Config) -> list[str]:
    """Return a log line about the configured faults, if any."""
    usual = vars(type(config.faults)())
    found = [f"{key}={value}" for key, value in vars(config.faults).items() if value != usual[key]]
    return [f"injected faults: {', '.join(found)}"] if found else []
