"""The doctor's default mesh, and the peak bandwidth along each mesh axis."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxgpt.cluster.process_group import ProcessGroup
from jaxgpt.config import MeshShape, UsageError
from jaxgpt.doctor.__main__ import parse
from jaxgpt.doctor.collectives import axis_link, default_mesh_shape
from jaxgpt.parallel.mesh import make_mesh
from jaxgpt.perf.hardware import DEVICES

CLUSTER = ProcessGroup("test")


@dataclasses.dataclass
class FakeDevice:
    process_index: int
    device_kind: str = "NVIDIA A100-SXM4-40GB"


class FakeMesh:
    """A mesh of 2,2,2 over eight processes with one GPU each."""

    axis_names = ("data", "fsdp", "tensor")
    shape = dict.fromkeys(axis_names, 2)
    devices = np.array([FakeDevice(i) for i in range(8)], object).reshape(2, 2, 2)


def test_the_default_mesh_separates_the_network_from_the_links_of_a_host(monkeypatch):
    assert default_mesh_shape(CLUSTER) == MeshShape(8)
    two_hosts = ProcessGroup("test", size=4, hosts=(0, 0, 2, 2))
    devices = [FakeDevice(i // 2) for i in range(8)]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    assert default_mesh_shape(two_hosts) == MeshShape(2, 1, 4)
    uneven = ProcessGroup("test", size=4, hosts=(0, 0, 0, 3))
    assert default_mesh_shape(uneven) == MeshShape(8)


def test_an_axis_is_compared_with_its_own_axis_link():
    simulated = make_mesh(MeshShape(2, 2, 2))
    assert axis_link(simulated, "data", CLUSTER) == (False, None)  # no data sheet
    two_hosts = ProcessGroup("test", size=8, hosts=(0, 0, 0, 0, 4, 4, 4, 4))
    a100 = DEVICES["a100"]
    assert axis_link(FakeMesh, "data", two_hosts) == (True, a100.network_bandwidth)
    for axis in ("fsdp", "tensor"):
        assert axis_link(FakeMesh, axis, two_hosts) == (False, a100.link_bandwidth)


def test_the_mesh_does_not_have_to_fit_a_model():
    """12 tiles of an Aurora node: 12 does not divide the heads or the MLP of the default model."""
    assert parse(["--mesh", "1,1,12"]).mesh == "1,1,12"
    with pytest.raises(UsageError, match="parallel.mesh=1,1: must be sizes"):
        parse(["--mesh", "1,1"])
