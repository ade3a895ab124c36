"""`bench collectives`: the doctor's collectives, beside a copy."""

import json

import pytest

from jobs import run


def test_collectives_of_two_processes_are_timed_beside_a_copy():
    job = run("bench", "collectives", "--json", "--mesh", "-1,1,2", processes=2)
    assert job.returncode == 0, job.stdout
    found = json.loads(job.stdout)  # process 0 alone prints
    assert found["processes"] == 2 and found["mesh"] == {"data": 1, "fsdp": 1, "tensor": 2}
    measured = found["measurements"]
    assert {(m["axis"], m["n"], m["error"]) for m in measured} == {("tensor", 2, None)}
    assert len({m["collective"] for m in measured}) == 8
    for m in measured:
        assert m["share_of_copy"] == pytest.approx(m["bus_bandwidth"] / found["copy_bandwidth"])
        if m["collective"] == "all-reduce":  # nccl-tests: 2 (n - 1) / n, which is 1
            assert m["bus_bandwidth"] == pytest.approx(m["bytes"] / m["seconds"])


def test_what_is_unknown_is_refused():
    job = run("bench", "collectives", "model.n_layer=2")
    assert job.returncode == 2
    assert "model.n_layer=2: unknown" in job.stdout and job.stdout.count("\n") == 1
