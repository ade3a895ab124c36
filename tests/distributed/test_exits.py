"""How a lone process ends."""

import signal
import subprocess
import sys

import pytest

from jobs import command, environment


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
from jaxgpt.distributed.exits import StopSignal

class Last:
    def __del__(self):  # when Python has given up its handlers
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
            kill(os_getpid(), number)

stop, last, kill, os_getpid = StopSignal(), Last(), os.kill, os.getpid
"""


def test_a_signal_after_the_end_does_not_change_the_status():
    job = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True)
    assert (job.returncode, job.stderr) == (0, "")
