"""`bench checkpoint` at a tiny size, and what it leaves behind."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from jaxgpt.bench import scratch
from jaxgpt.cluster.process_group import ProcessGroup
from jobs import command, environment, process_of, run

TINY = ("--config", "tiny", "--size", "6MB")


def test_a_checkpoint_of_several_processes_is_timed_beside_plain_files(tmp_path):
    job = run(
        "bench", "checkpoint", *TINY, "--mesh", "1,2,1", "--out", tmp_path, "--json", processes=2
    )
    assert job.returncode == 0, job.stdout
    found = json.loads(job.stdout)  # process 0 alone prints
    assert found["processes"] == 2 and found["mesh"]["fsdp"] == 2
    # Whole layers of 12 D^2 parameters and two moments, float32: tiny's D is 128.
    assert abs(found["state_bytes"] - 6e6) < 0.6 * 3 * 4 * 12 * 128**2
    # Not compressed: the numbers, and little beside them.
    assert found["state_bytes"] < found["file_bytes"] < 1.1 * found["state_bytes"]
    assert found["files"] > 2
    assert 0 < found["save_blocks_seconds"] <= found["save_seconds"]
    for ratio in ("save_ratio", "restore_ratio", "restore_ratio_keeping"):
        assert found[ratio] > 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("number", "processes"),
    [(signal.SIGINT, None), (signal.SIGTERM, None), (signal.SIGTERM, 2), (signal.SIGKILL, None)],
)
def test_nothing_is_left_when_it_is_interrupted(number, processes, tmp_path):
    size = ("--size", "60MB", "--out", tmp_path)
    job = subprocess.Popen(
        command("bench", "checkpoint", "--config", "tiny", *size, processes=processes),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment(TMPDIR=str(tmp_path)),
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("*/checkpoint/checkpoints/1*")) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert job.poll() is None and os.listdir(tmp_path)
    if processes:  # as Slurm and PBS do, which ask all processes
        for rank in range(processes):
            os.kill(process_of(tmp_path, rank), number)
    else:
        job.send_signal(number)
    assert job.wait(30) == (-number if number == signal.SIGKILL else 128 + number)
    # What was still being written is removed by a process that outlives those of the job.
    deadline = time.monotonic() + 5
    while (left := list(tmp_path.glob("jaxgpt*"))) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left


DEAF = """
import os, pathlib, sys, time
from jaxgpt.bench.scratch import scratch_folder
from jaxgpt.cluster.process_group import ProcessGroup

class Last:
    def __del__(self):  # where Python ignores what is raised
        os.kill(os.getpid(), int(sys.argv[2]))
        time.sleep(0.1)

with scratch_folder(ProcessGroup("test"), pathlib.Path(sys.argv[1])):
    Last()
    time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_counts_where_its_exception_is_lost(number, tmp_path):
    words = [sys.executable, "-c", DEAF, str(tmp_path), str(int(number))]
    job = subprocess.run(words, capture_output=True, text=True, timeout=30)
    assert "Exception ignored in" in job.stderr
    assert job.returncode == 128 + number
    assert not list(tmp_path.iterdir())


def test_a_process_that_ends_by_itself_leaves_no_folder(monkeypatch, tmp_path):
    """Without the one that outlives it."""
    monkeypatch.setattr(scratch, "_remove_after_all", lambda cluster, folder: None)
    monkeypatch.setattr(scratch, "end_on_signals", lambda: None)
    with (
        pytest.raises(ValueError),
        scratch.scratch_folder(ProcessGroup("test"), tmp_path) as folder,
    ):
        (folder / "written" / "so far").mkdir(parents=True)
        raise ValueError
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--size", "1 gigabyte"], "--size=1 gigabyte: must be a size such as 500MB or 1GB"),
        (["--out", "/dev/null/x"], "--out=/dev/null/x: cannot be written"),
        (
            ["--size", "9999999GB"],
            "layers takes 9,999,998,962MB, twice; give a smaller --size, or another",
        ),
        (
            ["--config", "tiny", "model.n_layer=9999999"],
            "tiny with 9999999 layers takes 23,623,678MB",
        ),
    ],
)
def test_what_is_wrong_is_said(arguments, words):
    job = run("bench", "checkpoint", *arguments)
    assert job.returncode == 2
    assert words in job.stdout and job.stdout.count("\n") == 1
