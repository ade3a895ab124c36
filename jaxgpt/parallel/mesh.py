"""The mesh of all devices of the job, with named axes."""

import math
from collections import Counter
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxgpt.config import Config, MeshShape, axes_with, check_batch, mesh_shape


def make_mesh(
    shape: MeshShape,
    hosts: Sequence[int] | None = None,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """Return a mesh with the given shape. There must be exactly `shape.n_devices` devices.

    Devices are ordered by host, process and ID. The last axis (`tensor`) therefore stays within a
    host if possible. On one host with CPUs or GPUs, `jax.make_mesh` gives the same order. Across
    hosts, `jax.make_mesh` can fail, and `mesh_utils.create_hybrid_device_mesh` gives the same order
    only if its granules are hosts.

    Args:
        hosts: the host number of each process, by rank. None means that ranks are ordered by host.
        devices: the devices of the mesh, by default all devices of the job.
    """

    def place(device: jax.Device) -> tuple[int, int, int]:
        process = device.process_index
        return (hosts[process] if hosts else 0), process, device.id

    devices = sorted(jax.devices() if devices is None else devices, key=place)
    assert shape.n_devices == len(devices), (shape, len(devices))
    sizes, axes = tuple(shape.values()), tuple(shape)
    return Mesh(np.array(devices).reshape(sizes), axes, axis_types=(AxisType.Auto,) * len(axes))


def job_mesh(config: Config, hosts: Sequence[int] | None = None) -> Mesh:
    """Return the mesh of all devices of the job, with the shape given by parallel.mesh.

    train.batch_size_per_device is ignored.

    Args:
        hosts: the host number of each process; see `make_mesh`.
    """
    shape = mesh_shape(config, jax.device_count())
    check_batch(config, shape)
    return make_mesh(shape, hosts)


def mesh_axes_with(role: str, mesh: Mesh) -> tuple[str, ...]:
    """Return the mesh axes that have the given role and a size above 1."""
    return tuple(axis for axis in axes_with(role) if mesh.shape[axis] > 1)


def device_hosts(mesh: Mesh, hosts: Sequence[int]) -> list[int]:
    """Return the host number of each device, in mesh order.

    Args:
        hosts: the host number of each process, by rank.
    """
    return [hosts[device.process_index] for device in mesh.devices.flat]


def devices_per_host(mesh: Mesh, hosts: Sequence[int]) -> int:
    """Return the number of devices of each host.

    If the numbers differ, return their greatest common divisor. Devices are in the order of
    `make_mesh`, so groups of this many neighboring devices never span hosts.

    Args:
        hosts: the host number of each process, by rank, as passed to `make_mesh`.
    """
    return math.gcd(*Counter(device_hosts(mesh, hosts)).values())


def hosts_spanned(axes: Sequence[str], shape: MeshShape, hosts: Sequence[int]) -> int:
    """Return the maximum number of hosts spanned by a group of devices along `axes`.

    Args:
        hosts: the host number of each device, in mesh order.
    """
    places = np.reshape(hosts, tuple(shape.values()))
    last = [list(shape).index(axis) for axis in axes]
    groups = np.moveaxis(places, last, range(-len(last), 0))
    groups = groups.reshape(-1, math.prod(shape[axis] for axis in axes))
    changes = np.diff(np.sort(groups, axis=1), axis=1) != 0
    return 1 + int(changes.sum(axis=1).max())


def tensor_crosses_hosts_warning(shape: MeshShape, hosts: Sequence[int]) -> tuple[str, ...]:
    """Return a tuple with one warning if a tensor-parallel group spans hosts.

    Otherwise, the tuple is empty.

    Args:
        hosts: the host number of each device, in mesh order.
    """
    n_hosts = hosts_spanned(axes_with("splits_heads"), shape, hosts)
    if n_hosts == 1:
        return ()
    return (
        f"parallel.mesh: tensor={shape.split_of('splits_heads')} spans {n_hosts} hosts, so "
        "every layer waits for the network between them; a smaller tensor and a larger fsdp are "
        "usually faster",
    )


def describe(mesh: Mesh) -> str:
    """Return the axis sizes as text, such as `data=2 fsdp=1 tensor=4`; see `MeshShape.describe`."""
    return MeshShape(**mesh.shape).describe()
