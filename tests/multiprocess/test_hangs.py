"""A job whose processes wait for one that has stopped ends, and says where."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from jobs import SMALL, command, environment, wait_for_step


def process_of(out, rank):
    """The id of the training process of a rank that writes to `out`."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().decode().split("\0")
                variables = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            if words[0] == sys.executable and str(out) in words and f"PMI_RANK={rank}" in variables:
                return int(entry.name)
    raise LookupError(f"rank {rank} of {out}")


def test_a_job_of_which_one_process_stops_ends_with_70_and_says_where(tmp_path):
    out = tmp_path / "run"
    arguments = (*SMALL, "--out", out, "--mesh", "2,1,1", "train.max_iters=1000000")
    job = subprocess.Popen(
        command("train", *arguments, "train.hang_timeout=0.1", processes=2),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(),
    )  # fmt: skip
    wait_for_step(out, 5, job)
    os.kill(process_of(out, 1), signal.SIGSTOP)
    began = time.monotonic()
    output, _ = job.communicate(timeout=60)
    assert job.returncode == 70, output
    assert 6 < time.monotonic() - began < 40
    errors = [line for line in output.splitlines() if line.startswith("error:")]
    assert len(errors) == 1, output
    assert "train.hang_timeout=0.1: process 0 has been at step" in errors[0]
    assert "Traceback" not in output
    assert "loop.py" in (out / "hang-0.txt").read_text()
