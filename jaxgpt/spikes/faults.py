"""Faults that are put into a training step on purpose."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxgpt.config import Config, UsageError, step_ranges
from jaxgpt.parallel.zero import ParamLayout
from jaxgpt.spikes.skip import SkipRanges


def inject_nan(config: Config, gradients: Any, layouts: Any, mesh: Mesh, step: jax.Array) -> Any:
    """Return gradients that are NaN on device faults.nan_device at step faults.nan_step.

    Inside `jax.shard_map`. Gradients that devices are known to share stay as they are.
    """
    faults = config.faults
    if faults.nan_step is None:
        return gradients
    axes = tuple(axis for axis, size in mesh.shape.items() if size > 1)
    device = jax.lax.axis_index(axes) if axes else 0
    hit = (step == faults.nan_step) & (device == faults.nan_device)

    def inject(gradient: jax.Array, layout: ParamLayout) -> jax.Array:
        own = layout.partial_axes | layout.mesh_axes >= set(axes)
        return jnp.where(hit, jnp.nan, gradient) if own else gradient

    return jax.tree.map(inject, gradients, layouts)


def check_faults(config: Config, n_devices: int) -> None:
    """Raise a UsageError if the device of faults.nan_device is not there."""
    faults = config.faults
    if faults.nan_step is not None and faults.nan_device >= n_devices:
        raise UsageError(f"faults.nan_device={faults.nan_device}: the mesh has {n_devices} devices")


def describe_faults(config: Config) -> list[str]:
    """Return lines for the log about faults that are put in on purpose."""
    faults, lines = config.faults, []
    ranges = SkipRanges(step_ranges("faults.random_tokens", faults.random_tokens))
    if ranges.ranges:
        lines.append(f"faults.random_tokens: steps {ranges} train on tokens drawn at random")
    if faults.nan_step is not None:
        lines.append(
            f"faults.nan_step: device {faults.nan_device} has a NaN gradient at {faults.nan_step}"
        )
    return lines
