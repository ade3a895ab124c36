"""How a single process ends."""

import signal
import subprocess
import sys

import pytest

from jobs import SMALL, command, environment, losses


@pytest.mark.parametrize(
    "words", ["inspect --config tiny --step 1", "prepare python --out {}", "sample --help"]
)
def test_nobody_hears_of_a_reader_that_has_seen_enough(words, tmp_path):
    job = subprocess.Popen(
        command(*words.format(tmp_path / "data").split()),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment(PYTHONUNBUFFERED=""),
    )  # fmt: skip
    job.stdout.close()
    assert job.stderr.read() == ""
    assert job.wait(30) == 128 + signal.SIGPIPE


def test_a_mistake_keeps_its_status_without_a_reader():
    script = (
        "from jaxgpt.cluster.shutdown import job_exit_handler; from jaxgpt.config import UsageError"
        "\nwith job_exit_handler():\n    print('text')\n    raise UsageError('out=x: wrong')"
    )
    job = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment(PYTHONUNBUFFERED=""),
    )  # fmt: skip
    job.stdout.close()
    assert job.stderr.read() == "error: out=x: wrong\n"
    assert job.wait(30) == 2


def test_a_report_that_nobody_reads_does_not_keep_a_process_alive():
    script = "from jaxgpt.cluster.shutdown import report_and_end; report_and_end('error: x', 3)"
    job = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE)
    job.stderr.close()
    assert job.wait(30) == 3


LATE = """
import os, signal
from jaxgpt.cluster.monitor import Monitor
from jaxgpt.cluster.stopping import StopSignal

class Last:
    def __del__(self):  # when Python has given up its handlers
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
            kill(os_getpid(), number)

stop, last, kill, os_getpid = StopSignal(Monitor()), Last(), os.kill, os.getpid
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
    """No file of the run gets their descriptors, to which libraries print."""
    words = command("train", *SMALL, "train.max_iters=2", "--out", tmp_path)
    job = subprocess.run(
        ["sh", "-c", f"exec \"$@\" {closed}", "sh", *map(str, words)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment(),
    )  # fmt: skip
    assert job.returncode == 0, job.stdout
    assert sorted(losses(tmp_path)) == [1, 2]


INTERRUPTED = """
import atexit, os
from jaxgpt.cluster.shutdown import job_exit_handler

with job_exit_handler():
    atexit.register(os.abort)  # as XLA may, if it is interrupted in compiling
    raise KeyboardInterrupt
"""


def test_an_interrupted_command_does_not_crash_at_its_exit():
    job = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True)
    assert (job.returncode, job.stdout, job.stderr) == (128 + signal.SIGINT, "", "")
