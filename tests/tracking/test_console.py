import os
import subprocess
import sys
from pathlib import Path

SAYS = """
from pathlib import Path
from jaxgpt.tracking.console import Console
console = Console(True, Path("train.log"))
console.info("one")
console.info("two")
"""
WITH_RULES = """
from pathlib import Path
from jaxgpt.cluster.shutdown import job_exit_handler
from jaxgpt.tracking.console import Console
with job_exit_handler():
    Console(True, Path("train.log")).info("\\u2502 step")
"""


def test_a_terminal_or_locale_of_few_characters_is_not_the_end(tmp_path):
    settings = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
    said = subprocess.run(
        [sys.executable, "-c", WITH_RULES],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env=os.environ | settings | {"PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert said.returncode == 0, said.stdout
    assert said.stdout == b"? step\n"
    assert (tmp_path / "train.log").read_text(encoding="utf-8").endswith(" \u2502 step\n")


def test_a_full_disk_behind_the_console_is_not_the_end(tmp_path):
    with Path("/dev/full").open("w") as full:
        said = subprocess.run([sys.executable, "-c", SAYS], cwd=tmp_path, stdout=full)
    assert said.returncode == 0
    one, warning, two = (tmp_path / "train.log").read_text().splitlines()
    assert one.endswith(" one") and two.endswith(" two")
    assert "warning: output to the console stopped: No space left" in warning
