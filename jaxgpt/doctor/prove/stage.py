"""One stage: what it may ask for, and the process that it runs in."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from jaxgpt.cluster.hardware import accelerator_expected
from jaxgpt.doctor.prove.results import StageResult


class Needs(Exception):
    """The stage cannot run here; the text says what it lacks."""


class StageFailure(Exception):
    """A command of the stage failed; the text says which, and its last words."""


class Request(NamedTuple):
    """What was asked for on the command line."""

    out: Path
    nanogpt: Path | None
    """A clone of nanoGPT."""
    torch: str | None
    """A Python with torch."""
    text: Path | None
    """Tiny Shakespeare, for losses; without it the data set that has been prepared."""


class Stage:
    """The folder, the time and the commands of a stage."""

    def __init__(self, name: str, request: Request, seconds: float):
        self.name, self.request = name, request
        self.folder = request.out / name
        self.on_gpu = accelerator_expected()
        self._began = time.monotonic()
        self._seconds = seconds
        self.result = StageResult(name)

    def left(self) -> float:
        """Return the seconds that are left of the stage's time."""
        return self._seconds - (time.monotonic() - self._began)

    def add(self, name: str, value: Any, unit: str = "", note: str = "") -> None:
        """Add a row, and write it at once."""
        row = self.result.add(self.on_gpu, name, value, unit, note)
        self.result.seconds = time.monotonic() - self._began
        self.result.write(self.folder)
        print(f"{self.name}: {row.name}: {row.value} {row.unit} {row.note}", flush=True)

    def end(self, status: Any, reason: str = "") -> None:
        self.result.status, self.result.reason = status, reason
        self.result.seconds = time.monotonic() - self._began
        self.result.write(self.folder)

    def run(
        self, *words: str, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run `python -m jaxgpt.WORDS` to its end; all that it prints goes to the stage's log.

        Raises:
            StageFailure: if it does not end with status 0.
        """
        command = [sys.executable, "-m", f"jaxgpt.{words[0]}", *words[1:]]
        print(f"$ {' '.join(command)}", flush=True)
        ended = subprocess.run(
            command, env={**os.environ, **(env or {})}, capture_output=True, text=True,
            errors="replace",
        )  # fmt: skip
        print(ended.stdout + ended.stderr, flush=True)
        if ended.returncode != 0:
            raise StageFailure(f"{' '.join(words)}: {last_words(ended)}")
        return ended

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        """Start `python -m jaxgpt.WORDS` in the background, with its words in the log."""
        command = [sys.executable, "-m", f"jaxgpt.{words[0]}", *words[1:]]
        print(f"$ {' '.join(command)} &", flush=True)
        return subprocess.Popen(command, stdout=sys.stdout, stderr=subprocess.STDOUT)

    def json(self, *words: str, env: dict[str, str] | None = None) -> dict[str, Any]:
        """Return the JSON that `python -m jaxgpt.WORDS --json` prints."""
        printed = self.run(*words, "--json", env=env).stdout
        return json.loads(printed[printed.index("{") :])


def last_words(ended: subprocess.CompletedProcess[str]) -> str:
    """Return a command's error, or its status and last line."""
    lines = [line.strip() for line in ended.stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    if errors:
        return errors[0]
    return f"ended with status {ended.returncode}: {lines[-1] if lines else 'without a word'}"


def end_with_parent() -> None:
    """Let this process and all that it starts end when the process that started it is gone."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.3)
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def run_stage(name: str, run: Callable[[Stage], None], request: Request, seconds: float) -> int:
    """Run one stage in this process, and return 0, or 1 if it failed."""
    end_with_parent()
    stage = Stage(name, request, seconds)
    stage.end("running")
    try:
        run(stage)
    except Needs as lacking:
        stage.end("needs", str(lacking))
        return 0
    except StageFailure as failure:
        stage.end("failed", str(failure))
        return 1
    except Exception as error:  # whatever a library raises belongs in the table
        traceback.print_exc()
        stage.end("failed", f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
        return 1
    stage.end("done")
    return 0
