"""How a lone process ends."""

import signal
import subprocess
import sys

import pytest

from jobs import SMALL, command, environment, losses


@pytest.mark.parametrize("words", ["inspect --config tiny --step 1", "prepare python --out {}"])
def test_nobody_hears_of_a_reader_that_has_seen_enough(words, tmp_path):
    job = subprocess.Popen(
        command(*words.format(tmp_path / "data").split()),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(),
    )  # fmt: skip
    job.stdout.close()
    assert job.stderr.read() == ""
    assert job.wait(30) == 128 + signal.SIGPIPE


LATE = """
import os, signal
from jaxgpt.cluster.health.preemption import StopSignal

class Last:
    def __del__(self):  # when Python has given up its handlers
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
            kill(os_getpid(), number)

stop, last, kill, os_getpid = StopSignal(), Last(), os.kill, os.getpid
"""


def test_a_signal_after_the_end_does_not_change_the_status():
    job = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True)
    assert (job.returncode, job.stderr) == (0, "")


@pytest.mark.parametrize(
    "closed",
    [
        pytest.param(">&-", marks=pytest.mark.long),
        pytest.param("2>&-", marks=pytest.mark.long),
        ">&- 2>&-",
    ],
)
def test_closed_streams_do_not_end_a_command(closed, tmp_path):
    """And no file of the run gets their descriptors, on which libraries print."""
    words = command("train", *SMALL, "train.max_iters=2", "--out", tmp_path)
    job = subprocess.run(
        ["sh", "-c", f"exec \"$@\" {closed}", "sh", *map(str, words)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment(),
    )  # fmt: skip
    assert job.returncode == 0, job.stdout
    assert sorted(losses(tmp_path)) == [1, 2]


ENDED = """
import atexit, os, sys
from jaxgpt.cluster import shutdown

class Board:
    rank = 1

    def post(self, status):
        print("posted", status, flush=True)
        return sys.argv[1] == "first"

    def read(self):
        return (0, 1) if sys.argv[1] == "second" else None

shutdown.PROPAGATION_SECONDS = 0
with shutdown.job_exit_handler(lambda: None if sys.argv[1] == "alone" else Board()):
    atexit.register(os.abort)  # as XLA may, if it is interrupted in compiling
    raise eval(sys.argv[2])
"""


def ended(board, error):
    """The status of a process that raises `error`, what it posted, and what it said."""
    variables = {"JAXGPT_RANK": "1", "JAXGPT_SIZE": "2", "JAXGPT_COORDINATOR": "localhost:29500"}
    job = subprocess.run(
        [sys.executable, "-c", ENDED, board, error], capture_output=True, text=True,
        env=environment(**variables if board != "alone" else {}),
    )  # fmt: skip
    return job.returncode, job.stdout, job.stderr


def test_an_interrupted_command_does_not_crash_at_its_exit():
    assert ended("alone", "KeyboardInterrupt") == (128 + signal.SIGINT, "", "")


def test_an_interrupted_process_ends_its_job():
    assert ended("first", "KeyboardInterrupt") == (128 + signal.SIGINT, "posted 130\n", "")


def test_a_process_that_fails_says_so_unless_another_has():
    status, posted, said = ended("first", "ValueError('bad')")
    assert (status, posted) == (1, "posted 1\n") and said.startswith("Traceback")
    assert ended("second", "ValueError('bad')") == (1, posted, "")
    assert ended("unreachable", "ValueError('bad')") == (
        1, posted, "process 1 cannot reach process 0, and ends by itself: ValueError: bad\n"
    )  # fmt: skip
