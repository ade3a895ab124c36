"""A watchdog whose file cannot be written ends the job nevertheless."""

import os
import threading

import pytest

from jaxgpt.cluster import shutdown as exits
from jaxgpt.cluster.health.heartbeat import Heartbeats, Progress, waiting_sentence
from jaxgpt.cluster.health.watchdog import Watchdog


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
    watching = Watchdog(0.002, directory, 3, terminate, Heartbeats(0.002, terminate))
    watching.heartbeat("the state to begin with", 30)
    assert not has_left.wait(0.5)
    watching.heartbeat("step 7")
    assert has_left.wait(10)
    ((report, status),) = left
    assert status == exits.HUNG
    assert report.startswith("error: train.hang_timeout=0.002: no progress for longer than 0.002")
    assert "process 0 on host localhost at step 7; " in report and "hang-3.txt" in report


def test_who_waits_for_whom_is_said():
    known = {0: Progress(9, "step 7"), 1: Progress(9, "step 7"), 2: Progress(8, "step 6"),
             3: Progress(10, "the evaluation after step 7")}  # fmt: skip
    names = ("a", "a", "b", "b")
    assert waiting_sentence([2], known, names) == (
        "process 2 on host b at step 6, for which wait processes 0, 1 at step 7 and process 3 at "
        "the evaluation after step 7"
    )
    same = dict.fromkeys(range(4), Progress(9, "step 7"))
    assert (
        waiting_sentence([0, 1, 2, 3], same, names)
        == "processes 0, 1, 2, 3 on hosts a, b at step 7"
    )
