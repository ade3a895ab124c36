"""The number of processes and the mesh do not change the results of real mpiexec jobs."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from jobs import AS_USERS, SMALL, checkpoint_arrays, losses, run, sha256, trace

HERE = Path(__file__).parent
CONFIG = (
    "shakespeare_char_cpu",
    "data.dataset=python",
    "model.n_layer=2",
    "model.n_embd=64",
    "train.batch_size=16",
)
MESHES = ("1,1,1", "8,1,1", "1,8,1", "1,1,4", "2,1,4", "2,2,2")


def layouts(processes, n_steps, meshes, *arguments, **extra):
    """Return mesh -> trace, from one job with `processes` processes."""
    result = run(
        HERE / "layouts.py", n_steps, *meshes, "--", *arguments, processes=processes,
        timeout=1200, **extra,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout
    line = next(line for line in result.stdout.splitlines() if line.startswith("found "))
    return json.loads(line.removeprefix("found "))


def devices(mesh):
    return int(np.prod([int(s) for s in mesh.split(",")]))


def assert_same(found, reference, label=""):
    difference = np.max(np.abs(np.divide(found["losses"], reference["losses"]) - 1))
    print(f"{label} largest relative difference of a loss: {difference:.1e}")
    assert found["params"] == reference["params"]
    assert found["rows"] == reference["rows"]
    np.testing.assert_allclose(found["losses"], reference["losses"], rtol=1e-4)


@pytest.mark.long  # in short, losses of several processes are compared where they write checkpoints
@pytest.mark.parametrize(
    ("processes", "mesh", "options"),
    [
        (2, "1,8,1", ()),
        (8, "2,1,4", ()),
        (2, "1,4,2", ("optimizer.name=muon",)),  # pieces of matrices go from process to process
        (2, "context=4", ("parallel.context_impl=ring",)),
        (2, "context=4", ("parallel.context_impl=ulysses",)),
    ],
)
def test_processes_change_nothing_but_the_layout(processes, mesh, options):
    reference = trace(20, *CONFIG, *options, "--mesh", "1,1,1", devices=1)
    assert_same(layouts(processes, 20, [mesh], *CONFIG, *options)[mesh], reference)


@pytest.mark.long
@pytest.mark.parametrize("mesh", MESHES)
def test_every_layout_of_nanogpts_setting(mesh, shakespeare):
    """Run on 1 process with n devices, n processes with 1 device, and 2 processes with n/2."""
    arguments = ("shakespeare_char_cpu", "train.batch_size=16")
    reference = trace(20, *arguments, "--mesh", "1,1,1", devices=1)
    n = devices(mesh)
    for processes in sorted({1, min(2, n), n}):
        found = layouts(processes, 20, [mesh], *arguments)[mesh]
        assert_same(found, reference, f"mesh {mesh}, {processes} processes:")


@pytest.mark.parametrize(("n", "tensor"), [(4, 2), pytest.param(8, 4, marks=pytest.mark.long)])
def test_a_checkpoint_of_many_processes_is_restored_by_two_and_by_one(n, tensor, tmp_path):
    many = tmp_path / "many"
    arguments = (*SMALL, "--out", many, "train.max_iters=6")
    job = run("train", *arguments, "--mesh", f"2,1,{tensor}", processes=n)
    assert job.returncode == 0, job.stdout
    reference = trace(6, *CONFIG, "model.n_layer=1", "--mesh", "1,1,1", devices=1)
    np.testing.assert_allclose(list(losses(many).values()), reference["losses"], rtol=1e-4)
    arrays = checkpoint_arrays(many, 6)
    for processes, mesh in ((2, f"1,{n},1"), (None, "1,1,1")):
        out = tmp_path / mesh
        shutil.copytree(many, out)
        job = run(
            HERE / "watched.py", "--out", out, "--mesh", mesh, "train.max_iters=9",
            processes=processes,
        )  # fmt: skip
        assert job.returncode == 0, job.stdout
        assert f"restored {sha256(nested(arrays))}" in job.stdout
        fsdp = mesh.split(",")[1]
        assert (
            f"resumed from step 6: mesh data=2 fsdp=1 tensor={tensor} on {n} processes -> "
            f"data=1 fsdp={fsdp} tensor=1 on {processes or 1}"
        ) in job.stdout
        assert list(losses(out)) == list(range(1, 10))
    ends = [[losses(tmp_path / m)[s] for s in (7, 8, 9)] for m in (f"1,{n},1", "1,1,1")]
    np.testing.assert_allclose(*ends, rtol=1e-4)


def nested(arrays):
    """{"['a']['b']": x} -> {"a": {"b": x}}"""
    out = {}
    for path, array in arrays.items():
        *outer, last = path[2:-2].split("']['")
        inner = out
        for key in outer:
            inner = inner.setdefault(key, {})
        inner[last] = array
    return out


@pytest.mark.long  # in short test_spikes.py compares the bits of two processes that went on
def test_two_processes_resume_bitwise(tmp_path):
    arguments = (*SMALL, "--mesh", "2,1,2", "train.max_iters=12")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    job = run("train", *arguments, "--out", whole, processes=2, **AS_USERS)
    assert job.returncode == 0, job.stdout
    for end in (6, 12):
        job = run(
            "train", *arguments, "--out", parts, f"train.max_iters={end}", processes=2,
            XLA_FLAGS=AS_USERS["XLA_FLAGS"],
        )  # fmt: skip
        assert job.returncode == 0, job.stdout
    assert losses(parts) == losses(whole)
    a, b = checkpoint_arrays(parts, 12), checkpoint_arrays(whole, 12)
    assert all((a[name] == b[name]).all() for name in b) and a.keys() == b.keys()
