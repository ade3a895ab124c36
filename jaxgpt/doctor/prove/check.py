"""One check of `prove`: the commands that it runs, and the rows of the table that it adds."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxgpt.cluster.hardware import accelerator_expected
from jaxgpt.doctor.prove.results import Result, Row, Status, shown


class CheckEnded(Exception):
    """A check cannot go on; the text says why."""

    status: Status


class Missing(CheckEnded):
    """This machine lacks something that the check needs."""

    status = "missing"


class CommandFailed(CheckEnded):
    """A command failed; the text names it and quotes its error."""

    status = "failed"


class OutOfTime(CheckEnded):
    """The check's time is over."""

    status = "cut off"


class Command(NamedTuple):
    """A command that a check has started, and the files with its output."""

    process: subprocess.Popen[bytes]
    stdout: Path
    stderr: Path


class Check:
    """A check that is running; its options are those of `prove`."""

    def __init__(
        self, result: Result, options: Namespace, seconds: float, save: Callable[[], None]
    ):
        self.result, self.options, self.seconds = result, options, seconds
        self.folder = options.out / result.check
        self.on_gpu = accelerator_expected()
        self._deadline = time.monotonic() + seconds
        self._save, self._commands = save, 0

    def execute(self, function: Callable[["Check"], None]) -> None:
        """Run the check's function in an empty folder, and record how it ended."""
        result, began = self.result, time.monotonic()
        result.status = "running"
        self._save()
        try:
            shutil.rmtree(self.folder, ignore_errors=True)  # left by an earlier try
            self.folder.mkdir()
            function(self)
            result.status = "done"
        except CheckEnded as error:
            result.status, result.reason = error.status, str(error)
        except Exception as error:  # a defect of one check must not end the others
            traceback.print_exc()
            first_line = str(error).partition("\n")[0]
            result.status, result.reason = "failed", f"{type(error).__name__}: {first_line}"
        result.seconds = time.monotonic() - began
        self._save()

    def add(
        self,
        name: str,
        value: Any,
        unit: str = "",
        note: str = "",
        *,
        at_least: float | None = None,
        at_most: float | None = None,
        source: str = "",
    ) -> None:
        """Add a row and save it at once.

        Args:
            at_least, at_most: the goal, if there is one.
            source: where the goal comes from.
        """
        goal, met = "", None
        bound = at_most if at_least is None else at_least
        if bound is not None:
            goal = f"at {'most' if at_least is None else 'least'} {shown(bound)}"
            goal += f" ({source})" if source else ""
            met = value is not None and bool(
                value <= bound if at_least is None else value >= bound  # both are False for NaN
            )
        self.result.rows.append(Row(name, value, unit, note, goal, met))
        self._save()

    @contextlib.contextmanager
    def start(
        self, module: str, *words: str, env: Mapping[str, str] | None = None
    ) -> Iterator[Command]:
        """Start `python -m MODULE WORDS`, or `python MODULE WORDS` for a script.

        Its output goes to files in the check's folder. The end of the block kills its whole
        process group.
        """
        command = [sys.executable, *([] if module.endswith(".py") else ["-m"]), module, *words]
        self._commands += 1
        paths = [self.folder / f"{self._commands}.{name}" for name in ("stdout", "stderr")]
        with paths[0].open("w") as out, paths[1].open("w") as err:
            print("$", *command, file=err, flush=True)
            process = subprocess.Popen(
                command, env={**os.environ, **(env or {})}, stdin=subprocess.DEVNULL, stdout=out,
                stderr=err, start_new_session=True,
            )  # fmt: skip
        try:
            yield Command(process, *paths)
        finally:
            with contextlib.suppress(ProcessLookupError):  # the whole group has already ended
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def wait(self, command: Command, until: Callable[[], bool] = lambda: False) -> int | None:
        """Return the exit status of a command, or None as soon as `until` is true.

        Raises:
            OutOfTime: if the check's time is over before that.
        """
        while (status := command.process.poll()) is None and not until():
            if time.monotonic() > self._deadline:
                raise OutOfTime(f"not done within its {self.seconds:.0f} s")
            time.sleep(0.02)
        return status

    def run(self, module: str, *words: str, env: Mapping[str, str] | None = None) -> str:
        """Run a command as `start` does, and return what it printed.

        Raises:
            CommandFailed: if its exit status is not 0.
            OutOfTime: if it does not end within the check's time.
        """
        with self.start(module, *words, env=env) as command:
            status = self.wait(command)
        printed, errors = command.stdout.read_text(), command.stderr.read_text(errors="replace")
        if status != 0:
            lines = [line for line in (printed + errors).splitlines() if line.strip()] or ["-"]
            named = [line for line in lines if line.startswith("error: ")]
            reason = named[0] if named else f"status {status}: {lines[-1]}"
            raise CommandFailed(f"{' '.join((module, *words))}: {reason}")
        return printed

    def json(
        self, module: str, *words: str, env: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Run a command with --json, and return the object that it prints."""
        printed = self.run(module, *words, "--json", env=env)
        return json.loads(printed[printed.index("{") :])
