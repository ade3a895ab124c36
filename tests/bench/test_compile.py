import json

import jax
import pytest

from jobs import run


def test_a_step_is_compiled_with_few_and_with_all_layers(tmp_path):
    job = run(
        "bench", "compile", "--config", "tiny", "--mesh", "1,2,1", "model.n_layer=16",
        "model.n_embd=32", "model.n_head=2", "parallel.scan_layers=True", "--layers", "16,1",
        "--runs", 1, "--json", JAX_COMPILATION_CACHE_DIR=str(tmp_path / "cache"),
    )  # fmt: skip
    assert job.returncode == 0, job.stdout
    found = json.loads(job.stdout)
    seconds = found["compile_seconds"]
    assert list(seconds) == list(found["trace_seconds"]) == ["1", "16"]
    assert found["ratio"] == pytest.approx(seconds["16"] / seconds["1"])
    assert found["versions"]["jax"] == jax.__version__
    assert found["mesh"]["fsdp"] == 2 and found["scan_layers"]
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("options", "processes", "words"),
    [
        (("--layers", "2,all"), None, "--layers=2,all: must be two or more different numbers"),
        (("--layers", "2,2"), None, "--layers=2,2: must be two or more different numbers"),
        (("model.n_layer=1",), None, "--layers=1,1: must be two or more different numbers"),
        (("--runs", "0"), None, "--runs: 0: must be a whole number, at least 1"),
        ((), 2, "2 processes, and this one runs in one; start it without mpiexec"),
    ],
)
def test_what_cannot_be_compiled_is_said(options, processes, words):
    job = run("bench", "compile", *options, processes=processes)
    assert job.returncode == 2, job.stdout
    assert words in job.stdout and job.stdout.count("\n") == 1
