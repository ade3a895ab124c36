"""The named device mesh: (data, fsdp, tensor) over all devices of the job."""

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxgpt.config import MESH_AXES


def make_mesh(sizes: tuple[int, ...]) -> Mesh:
    """A mesh of all devices of the job.

    Devices are taken process by process, so `tensor`, the last axis, stays inside a host whose
    processes have consecutive ranks, and `data`, the first, crosses hosts. That is what
    jax.make_mesh gives on one host; across hosts of GPUs it can refuse.

    Args:
        sizes: one per axis of `MESH_AXES`; their product is the number of devices.
    """
    devices = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
    assert np.prod(sizes) == len(devices), (sizes, len(devices))
    return Mesh(
        np.array(devices).reshape(sizes), MESH_AXES, axis_types=(AxisType.Auto,) * len(sizes)
    )


def describe(mesh: Mesh) -> str:
    """The mesh in a log line: `data=2 fsdp=1 tensor=4`."""
    return " ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
