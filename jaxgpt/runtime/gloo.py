"""Where Gloo, the collective library between CPUs, listens for other processes."""

import functools
import ipaddress
import socket

from jaxgpt.cluster.process_group import ProcessGroup


def set_gloo_interface(cluster: ProcessGroup, coordinator: str) -> None:
    """Has Gloo use this host's address in the network that leads to the coordinator.

    By itself it takes what this host's own name stands for: on Debian 127.0.1.1, which no other
    host can reach, and on some laptops nothing, so that it fails. To be called before JAX makes
    its first device.

    Args:
        coordinator: its host:port.
    """
    from jaxlib import _jax  # JAX has no public setting for this

    address = outward_address(cluster, coordinator.rpartition(":")[0].strip("[]"))
    make = _jax.make_gloo_tcp_collectives
    _jax.make_gloo_tcp_collectives = functools.partial(make, hostname=address)


def outward_address(cluster: ProcessGroup, coordinator: str) -> str:
    """The address at which this host is reached by the others; loopback if there are none.

    The coordinator's own host may know itself by loopback only: it takes the way to another.

    Args:
        coordinator: the name or address of process 0's host.
    """
    everyone = cluster.allgather(_address_towards(coordinator))
    mine = everyone[cluster.rank]
    outward = [a for a in everyone if not ipaddress.ip_address(a).is_loopback]
    return mine if mine in outward or not outward else _address_towards(outward[0])


def _address_towards(host: str) -> str:
    """This host's own address on the way to `host`.

    Raises:
        OSError: if there is no way.
    """
    error = None
    for family, kind, _, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
        with socket.socket(family, kind) as s:
            try:
                s.connect(address)  # sends nothing, but chooses the interface
                return s.getsockname()[0]
            except OSError as e:
                error = e
    raise error
