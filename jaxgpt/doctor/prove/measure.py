"""Commands and table rows for the checks of `prove`."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxgpt.cluster.hardware import accelerator_expected


class CommandFailed(Exception):
    """A command failed or ended too early; the message gives its module and exit status."""


class Missing(Exception):
    """Something that a check needs is missing on this machine."""


class Row(NamedTuple):
    """One line of the result table."""

    name: str
    value: float | str | None
    unit: str = ""  # "%" if the value is a fraction, to be shown as a percentage
    note: str = ""
    goal: str = ""  # empty if the row has no goal
    met: bool | None = None

    @property
    def shown(self) -> str:
        """The value as text, or "-" if it is empty or None. Numbers are rounded and have units."""
        if isinstance(self.value, str) or self.value is None:
            return self.value or "-"
        if self.unit == "%":
            return f"{self.value:.1%}"
        number = f"{self.value:,.0f}" if abs(self.value) >= 1000 else f"{self.value:.4g}"
        return f"{number} {self.unit}".strip()


def row(
    name: str,
    value: float | None,
    unit: str = "",
    note: str = "",
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    source: str = "",
) -> Row:
    """Return a row. Its goal, if any, is given by either `at_least` or `at_most`.

    If `unit` is "%", the value and the goal are fractions. A value of None or NaN misses the goal.
    `source` is the origin of the goal.
    """
    bound = at_most if at_least is None else at_least
    if bound is None:
        return Row(name, value, unit, note)
    goal = f"at {'most' if at_least is None else 'least'} {Row('', bound, unit).shown}"
    goal += f" ({source})" if source else ""
    # Both comparisons are False for NaN.
    met = value is not None and (value <= bound if at_least is None else value >= bound)
    return Row(name, value, unit, note, goal, met)


class Commands:
    """Runs the commands of one check, and appends their output to `log` in the check's folder.

    If a call to `run` or `json` reaches the time limit, its output is lost. When a call
    ends, the remaining processes in the command's process group are killed. All methods raise
    `OSError` if the command cannot be started or the log cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        seconds: float,
        nanogpt: Path | None = None,
        torch: str = sys.executable,
        text: Path | None = None,
    ):
        """Start the timer, which limits the total time of all commands.

        Args:
            folder: the check's folder, which must exist when a command starts.
            seconds: the time limit for all commands together, counted from now.
            nanogpt: path of a clone of nanoGPT, if there is one.
            torch: a Python executable that can import PyTorch.
            text: path of a file with the text of Tiny Shakespeare, if there is one.
        """
        self.folder, self.nanogpt, self.torch, self.text = folder, nanogpt, torch, text
        self.cache = f"compile_cache={folder.parent / 'compiled'}"  # a setting for the commands
        self.on_gpu = accelerator_expected()
        self._deadline = time.monotonic() + seconds

    def run(
        self, module: str, *words: str, accepted: Sequence[int] = (0,), **variables: str
    ) -> str:
        """Run `python -m MODULE WORDS`, or a script if `module` ends in .py; return its stdout.

        `variables` are added to the environment of the command.

        Raises:
            CommandFailed: if the exit status is not in `accepted`.
            subprocess.TimeoutExpired: if the command does not finish within the check's time limit.
        """
        command = _command_line(module, words)
        with self._started(command, subprocess.PIPE, subprocess.PIPE, variables) as process:
            stdout, stderr = process.communicate(timeout=self._deadline - time.monotonic())
        with (self.folder / "log").open("a") as log:
            log.write(f"$ {' '.join(command)}\n{stdout}{stderr}")
        if process.returncode not in accepted:
            last_line = (stdout + stderr).strip().rpartition("\n")[2]
            raise CommandFailed(f"{module} ended with status {process.returncode}: {last_line}")
        return stdout

    def json(self, module: str, *words: str, **variables: str) -> dict[str, Any]:
        """Run a command as `run` does, but with --json, and return the JSON object in its stdout.

        Ignores output before the first `{`, and raises `ValueError` if the rest is not a JSON
        object.
        """
        printed = self.run(module, *words, "--json", **variables)
        return json.loads(printed[printed.index("{") :])

    def kill_when(self, reached: Callable[[], bool], module: str, *words: str) -> None:
        """Start a command, and kill it as soon as `reached` returns True.

        Raises:
            CommandFailed: if the command ends before it is killed.
            subprocess.TimeoutExpired: if `reached` still returns False at the check's time limit.
        """
        command, is_reached = _command_line(module, words), False
        with (
            (self.folder / "log").open("a") as log,
            self._started(command, log, log, {}) as process,
        ):
            while process.poll() is None and not (is_reached := reached()):
                if time.monotonic() > self._deadline:
                    raise subprocess.TimeoutExpired(command, 0)
                time.sleep(0.02)
        if not is_reached or process.returncode != -signal.SIGKILL:
            raise CommandFailed(f"{module} ended too early, with status {process.returncode}")

    @contextlib.contextmanager
    def _started(
        self,
        command: Sequence[str],
        stdout: Any,
        stderr: Any,
        variables: Mapping[str, str],
    ) -> Iterator[subprocess.Popen[str]]:
        """Start a command; at the end of the block, kill it and its process group."""
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, text=True,
            errors="replace", env={**os.environ, **variables}, start_new_session=True,
        ) as process:  # fmt: skip
            try:
                yield process
            finally:
                with contextlib.suppress(ProcessLookupError):  # all have ended
                    os.killpg(process.pid, signal.SIGKILL)


def _command_line(module: str, words: Sequence[str]) -> list[str]:
    return [sys.executable, *([] if module.endswith(".py") else ["-m"]), module, *words]
