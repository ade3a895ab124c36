"""The whole report of one process with eight simulated devices."""

import dataclasses
import json
import math
import re

import pytest

from jaxgpt.cluster.process_group import ProcessGroup
from jaxgpt.config import MeshShape
from jaxgpt.doctor import collectives, training
from jaxgpt.doctor import report as doctor
from jaxgpt.doctor.report import run_checks

CLUSTER = ProcessGroup("test")
LN_256 = math.log(256)
FOUND = {"coordinator": None, "notes": []}


@pytest.fixture
def quick(monkeypatch):
    """Measure only the smallest arrays."""
    monkeypatch.setattr(doctor, "COLLECTIVES_SECONDS", 0.0)


def test_the_text_report_explains_each_collective_on_every_axis(quick, tmp_path, capsys):
    assert run_checks(CLUSTER, FOUND, MeshShape(2, 1, 4), tmp_path / "runs", as_json=False) == 0
    lines = capsys.readouterr().out.splitlines()
    for axis in ("data", "tensor"):
        for collective in collectives.COLLECTIVE_TESTS:
            (line,) = [x for x in lines if x.startswith(f"OK   {collective.name} over {axis}: ")]
            assert collective.meaning in line
    assert not any(" over fsdp" in line for line in lines)
    (line,) = [x for x in lines if x.startswith("OK   training: ")]
    first, last = map(float, re.findall(r"\d\.\d{3}", line))
    assert first == pytest.approx(LN_256, abs=0.05)  # an untrained model
    assert last < first - 0.5
    assert line.endswith("all devices end with the same parameters")
    assert lines[-1].endswith("0 FAIL")


def test_json_output_is_one_object_even_if_a_check_fails(quick, tmp_path, capsys, monkeypatch):
    wrong = dataclasses.replace(collectives.COLLECTIVE_TESTS[0], run=lambda x, axis, n: x)
    monkeypatch.setattr(collectives, "COLLECTIVE_TESTS", (wrong, *collectives.COLLECTIVE_TESTS[1:]))
    assert run_checks(CLUSTER, FOUND, None, tmp_path, as_json=True) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["status"] == "FAIL"
    failed = [c for c in report["checks"] if c["status"] == "FAIL"]
    assert [c["name"] for c in failed] == ["all-reduce over data", "training"]
    assert "wrong result" in failed[0]["finding"]
    assert "not tried" in failed[1]["finding"]  # it could hang
    assert all(c["remedy"] for c in failed)


def test_an_exception_in_training_is_a_failed_check(quick, tmp_path, capsys, monkeypatch):
    def refuse(cluster):
        raise RuntimeError("out of memory\nand more")

    monkeypatch.setattr(training, "train_ten_steps", refuse)
    assert run_checks(CLUSTER, FOUND, MeshShape(8), tmp_path, as_json=False) == 1
    assert "FAIL training: process 0: RuntimeError: out of memory\n" in capsys.readouterr().out
