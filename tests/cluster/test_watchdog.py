"""A watchdog whose file cannot be written ends the job nevertheless."""

import os
import threading

import pytest

from jaxgpt.cluster import shutdown as exits
from jaxgpt.cluster.watchdog import Watchdog


@pytest.mark.parametrize("file", ["none", "a pipe that nobody reads"])
def test_a_file_system_that_fails_or_hangs_does_not_keep_a_job_alive(file, tmp_path):
    directory, left, has_left = tmp_path / "run", [], threading.Event()

    def terminate(report, status):
        left.append((report, status))
        watching.close()  # it does not return where it is not replaced
        has_left.set()

    if file != "none":
        directory.mkdir()
        os.mkfifo(directory / "hang-3.txt")
    watching = Watchdog(0.002, directory, 3, terminate)
    watching.heartbeat("the state to begin with", 30)
    assert not has_left.wait(0.5)
    watching.heartbeat("step 7")
    assert has_left.wait(10)
    ((report, status),) = left
    assert status == exits.HUNG
    assert report.startswith("error: train.hang_timeout=0.002: process 3 has been at step 7")
