"""If a process of a job stops, the job names it and ends, and a supervisor restarts the job."""

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from jobs import SMALL, checkpoint_arrays, command, environment, process_of, run, wait_for_step

STOPPED = Path(__file__).with_name("stopped.py")
SETTINGS = (
    *SMALL, "--mesh", "3,1,1", "train.batch_size=15", "train.max_iters=20",
    "checkpoint.interval=10", "train.eval_interval=10", "train.hang_timeout=0.1",
)  # fmt: skip
PHASES = {  # as the monitor calls them -> whether a run has to be gone on with
    "start": False,
    "the compilation": False,
    "step 5": False,
    "the checkpoint of step 10": False,
    "the evaluation after step 10": False,
    "the setup of the state": True,
}
SHORT = {("the compilation", 1)}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return an uninterrupted run."""
    out = tmp_path_factory.mktemp("hangs") / "whole"
    job = run("train", *SETTINGS, "--out", out, processes=3)
    assert job.returncode == 0, job.stdout
    return out


@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize("phase", PHASES)
def test_a_process_that_stops_is_named_and_the_job_started_again(
    phase, rank, whole, tmp_path, request
):
    if (phase, rank) not in SHORT and not request.config.getoption("--long"):
        pytest.skip("the long form of a check: give --long")
    out = tmp_path / "run"
    if PHASES[phase]:
        job = run("train", *SETTINGS, "train.max_iters=10", "--out", out, processes=3)
        assert job.returncode == 0, job.stdout
    script = command(STOPPED, phase, rank, tmp_path / "mark", *SETTINGS, "--out", out)
    job = run("launch", "-n", 3, "--restarts", 1, "--", *script)
    assert (tmp_path / "mark").read_text() == phase
    assert job.returncode == 0, job.stdout
    said, again = job.stdout.split("launch: attempt 1 ended with status ")
    print(f"{phase}, process {rank}: ended {again.splitlines()[0]}")
    errors = [line for line in said.splitlines() if line.startswith("error:")]
    assert len(errors) == 1, said
    name = f"missing ranks: {rank};" if phase == "start" else rf"process {rank} on host \S+ at "
    assert re.search(name, errors[0]), said
    if phase != "start":
        assert f"at {phase}" in errors[0]
    assert "Traceback" not in job.stdout
    a, b = (checkpoint_arrays(directory, 20) for directory in (out, whole))
    assert a.keys() == b.keys() and all((a[name] == b[name]).all() for name in b)


@pytest.mark.long  # in short, one stops while it compiles
def test_a_job_of_which_one_process_stops_ends_with_70_and_says_where(tmp_path):
    arguments = (*SMALL, "--out", tmp_path, "--mesh", "3,1,1", "train.batch_size=15")
    job = subprocess.Popen(
        command(
            "train", *arguments, "train.max_iters=1000000", "train.hang_timeout=0.1", processes=3
        ),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(),
    )  # fmt: skip
    wait_for_step(tmp_path, 5, job)
    os.kill(process_of(tmp_path, 1), signal.SIGSTOP)
    output, _ = job.communicate(timeout=60)
    assert job.returncode == 70, output
    (error,) = [line for line in output.splitlines() if line.startswith("error:")]
    # It said where it was up to 1.5 s before.
    said = (
        r"error: train.hang_timeout=0.1: process 1 on host \S+ at .+ has not been heard from for "
        r"0.1 minutes; process.* waiting for it at .*step \d+; the process or its host has stopped "
        r"responding; .*hang-<process>.txt has .*; to resume, start again with the same --out"
    )
    assert re.fullmatch(said, error), error
    assert "Traceback" not in output
    assert "train/loop.py" in (tmp_path / "hang-0.txt").read_text()


@pytest.mark.long
@pytest.mark.parametrize(
    ("where", "activity"),
    [
        ("waits", "the batch of step 5"),
        ("devices", "the start of JAX and its devices"),
    ],
)
def test_a_process_that_waits_for_ever_is_told_from_those_that_wait_for_it(
    where, activity, tmp_path
):
    job = run(
        Path(__file__).with_name("faulty.py"), where, 2, *SETTINGS, "--out", tmp_path, processes=3
    )
    assert job.returncode == 70, job.stdout
    (error,) = [line for line in job.stdout.splitlines() if line.startswith("error:")]
    # Devices start together: those that wait for them cannot be told apart but by their files.
    named = "processes 0, 1 and 2" if where == "devices" else "process 2"
    assert f"{named} on host" in error and f"at {activity}" in error
    assert ("waiting for it" in error) == (where == "waits")
    assert "Traceback" not in job.stdout
    assert "faulty.py" in (tmp_path / "hang-2.txt").read_text()
