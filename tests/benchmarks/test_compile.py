import json

import pytest

from jobs import run


def test_a_step_is_compiled_with_few_and_with_all_layers():
    job = run(
        "bench", "compile", "--config", "tiny", "--mesh", "1,2,1", "model.n_layer=4",
        "model.n_embd=32", "model.n_head=2", "parallel.scan_layers=True", "--runs", 1, "--json",
    )  # fmt: skip
    assert job.returncode == 0, job.stdout
    found = json.loads(job.stdout)
    one, four = found["layers"]
    assert (one["n_layer"], four["n_layer"]) == (1, 4)
    assert found["ratio"] == pytest.approx(four["compile_seconds"] / one["compile_seconds"])
    assert 0 < found["ratio"] < 2  # the layers are one loop, whose body is compiled once
    assert found["mesh"]["fsdp"] == 2 and found["scan_layers"]


def test_what_cannot_be_compiled_is_said():
    job = run("bench", "compile", "--layers", "2,all")
    assert job.returncode == 2
    assert job.stdout == "error: --layers=all: must be a whole number, at least 1\n"
