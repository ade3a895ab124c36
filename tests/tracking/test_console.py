"""The console: what a terminal, a pipe and train.log get."""

import os
import pty
import re
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest

from jaxgpt.tracking.appended_file import printable
from jaxgpt.tracking.console import Console, table_text, wrap
from terminal import run_in_terminal

SAYS = """
from pathlib import Path
from jaxgpt.tracking.console import Console
console = Console(Path("train.log"), prints=True)
console.info("one")
console.info("two")
"""
WITH_RULES = """
from pathlib import Path
from jaxgpt.cluster.shutdown import job_exit_handler
from jaxgpt.tracking.console import Console
with job_exit_handler():
    Console(Path("train.log"), prints=True).info("\\u2502 step")
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


def test_a_terminal_of_unknown_size_has_no_width(monkeypatch):
    control, terminal = pty.openpty()  # 0 columns
    console = Console(None, prints=True)
    monkeypatch.setattr(console, "_mpiexec_output", Path(os.ttyname(terminal)))
    assert console.width is None
    os.close(control)
    os.close(terminal)


EVERY_CHARACTER = "".join(map(chr, range(0x3000)))


def test_nothing_that_moves_the_cursor_is_printed():
    """Unicode's categories are the reference: control characters, line and paragraph separators."""
    kept = {c for c in printable(EVERY_CHARACTER) if unicodedata.category(c) in ("Cc", "Zl", "Zp")}
    assert kept == {"\t", "\n"}
    assert printable("a\r\nb") == "a\nb"
    ordinary = "\u00e9 \u03bb \u4f60 \U0001f600"
    assert printable(ordinary) == ordinary


def test_a_table_has_no_colors_even_in_a_terminal(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    assert "\x1b" not in table_text(("a", "b"), [("1", "2")], 40, title="T")


def test_a_table_keeps_its_width_on_a_dumb_terminal(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    assert max(map(len, table_text(("a", "b"), [("x " * 30, "2")], 40).splitlines())) <= 40


def test_a_table_shows_brackets_and_colons_as_they_are():
    assert "run[lr=1] [/b] :smile:" in table_text(("run",), [("run[lr=1] [/b] :smile:",)], 40)


@pytest.mark.parametrize("width", [20, 80])
def test_long_lines_are_broken_at_spaces(width):
    text = (
        "a " * 100 + "/a/path/that/is/longer/than/the/whole/terminal/and/stays/one/word/to/copy/it"
    )
    lines = wrap(f"short\n{text}", width).split("\n")
    assert lines[0] == "short"
    assert "".join(lines[1:]).replace(" ", "") == text.replace(" ", "")
    assert all(len(line) <= width for line in lines[:-1])
    assert wrap(text, None) == text


# One write per process, so that the lines of two processes do not mix.
SHOWS_WIDTH = """
import os
from pathlib import Path
from jaxgpt.tracking.console import Console
os.write(1, f"width {Console(Path('/dev/null'), prints=True).width}\\n".encode())
"""


@pytest.mark.parametrize("launcher", [[], ["mpiexec", "-n", "2"]])
def test_the_width_is_that_of_the_terminal_even_behind_mpiexec(launcher):
    said = run_in_terminal([*launcher, sys.executable, "-c", SHOWS_WIDTH], 93, 24)
    assert set(re.findall("width (.*)", said)) == {"93"}


@pytest.mark.parametrize("launcher", ["", "mpiexec -n 2 "])
def test_a_pipe_has_no_width(launcher, tmp_path):
    """Even in a terminal, from which mpiexec is started."""
    (tmp_path / "show.py").write_text(SHOWS_WIDTH)
    line = f"{launcher}{sys.executable} {tmp_path / 'show.py'} | cat"
    assert set(re.findall("width (.*)", run_in_terminal(["sh", "-c", line], 93, 24))) == {"None"}
