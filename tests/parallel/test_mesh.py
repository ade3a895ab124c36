from dataclasses import dataclass

import jax
import numpy as np
import pytest

from jaxgpt.config import MeshShape
from jaxgpt.parallel.mesh import (
    describe,
    device_hosts,
    devices_per_host,
    make_mesh,
    tensor_crosses_hosts_warning,
)


@dataclass(frozen=True)
class Device:
    """The attributes of a device that a mesh uses, for a job on several hosts."""

    id: int
    process_index: int
    platform: str = "gpu"


@pytest.fixture
def two_hosts(monkeypatch):
    """Eight processes with one device each, which the launcher placed on two hosts in turn."""
    devices = [Device(id=i, process_index=i) for i in range(8)]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    return (0, 1) * 4


def test_tensor_lies_on_neighboring_devices():
    mesh = make_mesh(MeshShape(2, 1, 4))
    ids = np.vectorize(lambda d: d.id)(mesh.devices)
    assert ids.squeeze().tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert describe(mesh) == "data=2 fsdp=1 tensor=4"


def test_data_crosses_hosts_and_tensor_does_not(two_hosts):
    mesh = make_mesh(MeshShape(2, 1, 4), two_hosts)
    on_hosts = np.vectorize(lambda d: two_hosts[d.process_index])(mesh.devices)
    assert on_hosts.squeeze().tolist() == [[0, 0, 0, 0], [1, 1, 1, 1]]
    assert warning(mesh, two_hosts) == ()


def warning(mesh, hosts):
    return tensor_crosses_hosts_warning(MeshShape(**mesh.shape), device_hosts(mesh, hosts))


@pytest.mark.parametrize(
    ("hosts", "expected"), [((0,) * 8, 8), ((0, 1) * 4, 4), ((0, 0, 0, 3, 3, 0, 0, 0), 2)]
)
def test_groups_of_devices_per_host_share_a_host(two_hosts, hosts, expected):
    mesh = make_mesh(MeshShape(8), hosts)
    assert devices_per_host(mesh, hosts) == expected
    groups = np.reshape(device_hosts(mesh, hosts), (-1, expected))
    assert all(len(set(group)) == 1 for group in groups)


def test_tensor_across_hosts_works_and_is_said(two_hosts):
    (sentence,) = warning(make_mesh(MeshShape(tensor=8), two_hosts), two_hosts)
    assert "tensor=8 spans 2 hosts" in sentence
    nobody_said = make_mesh(MeshShape(4, 1, 2))  # which process is where
    (sentence,) = warning(nobody_said, two_hosts)
    assert "tensor=2 spans 2 hosts" in sentence
