"""How a lone process ends."""

import signal
import subprocess

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
