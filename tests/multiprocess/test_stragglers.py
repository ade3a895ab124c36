"""A slow process is named. If the whole machine is busy, no process is named."""

import os
import signal
import subprocess
import time

import pytest

from jobs import SMALL, command, environment, process_of, records, run, wait_for_step

SLOW, PAUSE = 2, 0.25  # a rank; seconds for which it is stopped, and then runs
PATIENCE = 240  # seconds


@pytest.mark.long
def test_a_process_that_is_stopped_for_half_of_the_time_is_named_once(tmp_path):
    job = subprocess.Popen(
        command(
            "train", *SMALL, "--out", tmp_path, "--mesh", "4,1,1", "train.max_iters=1000000",
            "train.log_interval=5", "train.hang_timeout=0.2", processes=4,
        ),
        stdout=subprocess.DEVNULL, env=environment(),
    )  # fmt: skip
    wait_for_step(tmp_path, 5, job)
    slow, deadline = process_of(tmp_path, SLOW), time.monotonic() + PATIENCE
    while not records(tmp_path, "straggler") and time.monotonic() < deadline:
        for how in (signal.SIGSTOP, signal.SIGCONT):
            os.kill(slow, how)
            time.sleep(PAUSE)
    job.terminate()
    job.wait(60)
    (found,) = records(tmp_path, "straggler")
    assert found["rank"] == SLOW and found["own"] > 1.3 * found["median"]
    log = (tmp_path / "train.log").read_text()
    assert log.count(f"warning: process {SLOW} on host {found['host']} is slow") == 1
    shown = run("report", "goodput", tmp_path).stdout
    assert f"process {SLOW} on host {found['host']} is slow: at step {found['step']}" in shown
