"""The named device mesh: (data, fsdp, tensor) over all devices of the job."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxgpt.config import MESH_AXES


def make_mesh(sizes: tuple[int, ...], hosts: Sequence[int] | None = None) -> Mesh:
    """A mesh of all devices of the job.

    Devices are taken host by host and process by process, so `tensor`, the last axis, stays
    inside a host, and `data`, the first, crosses hosts. That is what jax.make_mesh gives on one
    host, and mesh_utils.create_hybrid_device_mesh across hosts; the first can refuse there.

    Args:
        sizes: one per axis of `MESH_AXES`; their product is the number of devices.
        hosts: the host of each process, as a number; None if processes of one host have
            consecutive ranks.
    """

    def place(device: jax.Device) -> tuple[int, int, int]:
        process = device.process_index
        return (hosts[process] if hosts else 0), process, device.id

    devices = sorted(jax.devices(), key=place)
    assert np.prod(sizes) == len(devices), (sizes, len(devices))
    return Mesh(
        np.array(devices).reshape(sizes), MESH_AXES, axis_types=(AxisType.Auto,) * len(sizes)
    )


def crossing(mesh: Mesh, hosts: Sequence[int]) -> tuple[str, ...]:
    """A sentence if groups along `tensor` span hosts, which works, and which hardly anyone wants.

    Args:
        hosts: the host of each process, as a number.
    """
    groups = mesh.devices.reshape(-1, mesh.shape["tensor"])
    most = max(len({hosts[device.process_index] for device in group}) for group in groups)
    if most == 1:
        return ()
    return (
        f"parallel.mesh: tensor={mesh.shape['tensor']} spans {most} hosts, and every layer waits "
        "for the network between them; a smaller tensor and more fsdp is mostly faster",
    )


def describe(mesh: Mesh) -> str:
    """The mesh in a log line: `data=2 fsdp=1 tensor=4`."""
    return " ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
