"""The report as a whole, in this process, on eight simulated devices."""

import dataclasses
import json
import math
import re

import jax
import numpy as np
import pytest

from jaxgpt.cluster.process_group import ProcessGroup
from jaxgpt.doctor import collectives, examination
from jaxgpt.doctor.examination import default_sizes, examine, link
from jaxgpt.doctor.training import N_STEPS, training_check
from jaxgpt.parallel.mesh import make_mesh
from jaxgpt.perf.hardware import DEVICES

CLUSTER = ProcessGroup("test")
LN_256 = math.log(256)
FOUND = {"coordinator": None, "notes": []}


@dataclasses.dataclass
class FakeDevice:
    process_index: int
    device_kind: str = "NVIDIA A100-SXM4-40GB"


class FakeMesh:
    """A mesh of 2,2,2 over eight processes with a GPU each."""

    axis_names = ("data", "fsdp", "tensor")
    shape = dict.fromkeys(axis_names, 2)
    devices = np.array([FakeDevice(i) for i in range(8)], object).reshape(2, 2, 2)


@pytest.fixture
def quick(monkeypatch):
    """Only the smallest arrays."""
    monkeypatch.setattr(examination, "TIME_FOR_COLLECTIVES", 0.0)


def test_a_person_reads_every_axis_with_what_a_collective_does(quick, tmp_path, capsys):
    assert examine(CLUSTER, FOUND, (2, 1, 4), tmp_path / "runs", as_json=False) == 0
    lines = capsys.readouterr().out.splitlines()
    for axis in ("data", "tensor"):
        for collective in collectives.COLLECTIVES:
            (line,) = [x for x in lines if x.startswith(f"OK   {collective.name} over {axis}: ")]
            assert collective.meaning in line
    assert not any(" over fsdp" in line for line in lines)
    (line,) = [x for x in lines if x.startswith("OK   training: ")]
    first, last = map(float, re.findall(r"\d\.\d{3}", line))
    assert first == pytest.approx(LN_256, abs=0.05)  # a model that knows nothing
    assert last < first - 0.5
    assert line.endswith("all devices end with the same parameters")
    assert lines[-1].endswith("0 FAIL")


def test_a_program_gets_one_object_also_when_something_fails(quick, tmp_path, capsys, monkeypatch):
    wrong = dataclasses.replace(collectives.COLLECTIVES[0], run=lambda x, axis, n: x)
    monkeypatch.setattr(
        collectives.measure_axis, "__defaults__", ((wrong, *collectives.COLLECTIVES[1:]),)
    )
    assert examine(CLUSTER, FOUND, None, tmp_path, as_json=True) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["status"] == "FAIL"
    failed = [c for c in report["checks"] if c["status"] == "FAIL"]
    assert [c["name"] for c in failed] == ["all-reduce over data", "training"]
    assert "wrong result" in failed[0]["finding"]
    assert "not tried" in failed[1]["finding"]  # it could wait for ever
    assert all(c["remedy"] for c in failed)


def test_steps_that_raise_are_a_line(quick, tmp_path, capsys, monkeypatch):
    def refuse(cluster):
        raise RuntimeError("out of memory\nand more")

    monkeypatch.setattr(examination, "train_ten_steps", refuse)
    assert examine(CLUSTER, FOUND, (8, 1, 1), tmp_path, as_json=False) == 1
    assert "FAIL training: process 0: RuntimeError: out of memory\n" in capsys.readouterr().out


def test_without_a_mesh_the_network_is_told_from_the_inside_of_a_host(monkeypatch):
    assert default_sizes(CLUSTER) == (8, 1, 1)
    two_hosts = ProcessGroup("test", size=4, hosts=(0, 0, 2, 2))
    devices = [FakeDevice(i // 2) for i in range(8)]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    assert default_sizes(two_hosts) == (2, 1, 4)
    uneven = ProcessGroup("test", size=4, hosts=(0, 0, 0, 3))
    assert default_sizes(uneven) == (8, 1, 1)


def test_an_axis_is_compared_with_its_own_link():
    simulated = make_mesh((2, 2, 2))
    assert link(simulated, "data", CLUSTER) == (False, None)  # of which there is no data sheet
    two_hosts = ProcessGroup("test", size=8, hosts=(0, 0, 0, 0, 4, 4, 4, 4))
    a100 = DEVICES["a100"]
    assert link(FakeMesh, "data", two_hosts) == (True, a100.network_bandwidth)
    for axis in ("fsdp", "tensor"):
        assert link(FakeMesh, axis, two_hosts) == (False, a100.link_bandwidth)


FALLING = [LN_256 - 0.1 * i for i in range(N_STEPS)]


@pytest.mark.parametrize(
    ("everyone", "words"),
    [
        ([(FALLING[::-1], "a")] * 2, "a new model's should be about 5.55"),
        ([([LN_256] * N_STEPS, "a")] * 2, "it should fall"),
        ([([LN_256, math.nan], "a")] * 2, "not a number"),
        ([(FALLING, "a"), ([*FALLING[:-1], 4.9], "a")], "on process 1 to 4.900"),
        ([(FALLING, "a"), (FALLING, "b")], "different parameters"),
        ([(FALLING, "a b")], "different parameters"),
    ],
)
def test_training_that_is_wrong_fails(everyone, words):
    check = training_check(everyone, 2)
    assert check.status == "FAIL"
    assert words in check.finding
    assert check.remedy
    assert training_check([(FALLING, "a")] * 2, 2).status == "OK"
