"""Links between devices: which mesh axis crosses hosts, and what can a device send along it?"""

import jax
from jax.sharding import Mesh

from jaxgpt.cluster.process_group import ProcessGroup
from jaxgpt.config import MeshShape
from jaxgpt.perf.hardware import find_device


def default_sizes(cluster: ProcessGroup) -> MeshShape:
    """Return a mesh that tells the network from the inside of a host: data over hosts, tensor in.

    On one host, or where hosts have different numbers of devices, all devices are along data.
    """
    n_devices, n_hosts = jax.device_count(), len(set(cluster.hosts))
    on_host = [0] * cluster.size
    for device in jax.devices():
        on_host[cluster.hosts[device.process_index]] += 1
    even = len({n for n in on_host if n}) == 1
    if n_hosts == 1 or not even:
        return MeshShape(n_devices)
    return MeshShape(n_hosts, 1, n_devices // n_hosts)


def axis_link(mesh: Mesh, axis: str, cluster: ProcessGroup) -> tuple[bool, float | None]:
    """Return whether a mesh axis crosses hosts, and the bytes/s that each device can then send.

    The rate is None where the device is not in the table of data sheets.
    """
    groups = mesh.devices.swapaxes(mesh.axis_names.index(axis), -1).reshape(-1, mesh.shape[axis])
    crosses = any(len({cluster.hosts[d.process_index] for d in group}) > 1 for group in groups)
    device = find_device(mesh.devices.flat[0].device_kind)
    if device is None:
        return crosses, None
    return crosses, device.network_bandwidth if crosses else device.link_bandwidth
