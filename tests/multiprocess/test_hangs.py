"""A job whose processes wait for one that has stopped ends, and says where."""

import os
import re
import signal
import subprocess

from jobs import SMALL, command, environment, process_of, wait_for_step


def hanging_job(out, stopped):
    """A job of three processes of which that one has been stopped."""
    arguments = (*SMALL, "--out", out, "--mesh", "3,1,1", "train.batch_size=15")
    job = subprocess.Popen(
        command(
            "train", *arguments, "train.max_iters=1000000", "train.hang_timeout=0.1", processes=3
        ),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(),
    )  # fmt: skip
    wait_for_step(out, 5, job)
    os.kill(process_of(out, stopped), signal.SIGSTOP)
    return job


def test_a_job_of_which_one_process_stops_ends_with_70_and_says_where(tmp_path):
    jobs = [hanging_job(tmp_path / str(stopped), stopped) for stopped in range(2)]
    for job, out, speaks in zip(jobs, (tmp_path / "0", tmp_path / "1"), ("1", "[02]"), strict=True):
        output, _ = job.communicate(timeout=60)
        assert job.returncode == 70, output
        errors = [line for line in output.splitlines() if line.startswith("error:")]
        assert len(errors) == 1, output
        said = re.search(rf"train.hang_timeout=0.1: process ({speaks}) has been at step", errors[0])
        assert said, output
        assert "Traceback" not in output
        assert "loop.py" in (out / f"hang-{said[1]}.txt").read_text()
