"""Trackers: the destinations for the records of a run."""

import importlib.util
import os
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from jaxgpt.cluster.environment import SUPERVISOR
from jaxgpt.config import UsageError, in_words
from jaxgpt.tracking.background import BackgroundTracker, FallenBehind
from jaxgpt.tracking.csv import Csv
from jaxgpt.tracking.jsonl import JsonLines, Samples
from jaxgpt.tracking.records import Record
from jaxgpt.tracking.supervisor import SupervisorLink
from jaxgpt.tracking.tensorboard import TensorBoard
from jaxgpt.tracking.trackio import Trackio
from jaxgpt.tracking.wandb import Wandb


class Tracker(Protocol):
    """A destination for records. All methods run on process 0, in one thread.

    If a method raises an error, the same call may be repeated later.
    """

    view: str
    """Command, path or address that shows the curves. It may be empty before `open` returns."""

    def open(self, run: Any, resume_step: int | None) -> None:
        """Start a new run, or continue after step `resume_step` and drop all later steps.

        Records whose kind is in `PERSISTENT_KINDS` may be kept. `run` has a `directory` and a
        `config`. `resume_step` is None for a new run.
        """

    def log(self, record: Record) -> None:
        """Write a record, or the parts of it that the destination can show."""

    def rewind(self, step: int) -> None:
        """Drop all steps after `step`, because the run will repeat them.

        Records whose kind is in `PERSISTENT_KINDS` may be kept.
        """

    def close(self) -> None:
        """Write all buffered records, and close the destination."""


# The choices for train.trackers. metrics.jsonl, samples.txt and the console are always on.
TRACKERS: dict[str, Callable[[], Tracker]] = {
    "tensorboard": TensorBoard,
    "csv": Csv,
    "wandb": Wandb,
    "trackio": Trackio,
}


def check_trackers(names: Sequence[str]) -> None:
    """Raise `UsageError` if a tracker in train.trackers is unknown or its package is missing."""
    for name in names:
        if name not in TRACKERS:
            raise UsageError(
                f"train.trackers={name}: unknown tracker; choose from {', '.join(TRACKERS)}, and "
                "separate names with spaces"
            )
        extra = getattr(TRACKERS[name], "extra", None)
        if extra and not _is_installed(extra):
            raise UsageError(
                f"train.trackers={name}: the package {extra} is not installed; run "
                f"pip install 'jaxgpt[{extra}]'"
            )


def _is_installed(package: str) -> bool:
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None  # W&B's folder ./wandb has no origin


class Trackers:
    """All trackers of a run. Only process 0 uses this class.

    Errors in trackers become warnings, except when metrics.jsonl is opened. While a tracker keeps
    failing, only its first error and any error in `close` are reported.
    """

    def __init__(self, run: Any, resume_step: int | None, say: Callable[[str], None]):
        """Open metrics.jsonl, samples.txt, the trackers in train.trackers and the supervisor link.

        The link is opened only under `jaxgpt.launch --restarts`. The trackers and the link run in
        separate threads. `run` and `resume_step` are as in `Tracker.open`, and train.trackers must
        have passed `check_trackers`. `say` prints a message.
        """
        self._say = say
        self._failing: set[str] = set()
        metrics = JsonLines()
        metrics.open(run, resume_step)
        self._all: dict[str, Tracker] = {"samples.txt": Samples()}
        for name in run.config.train.trackers:
            self._all[f"train.trackers={name}"] = BackgroundTracker(TRACKERS[name]())
        if SUPERVISOR in os.environ:
            self._all["the link to jaxgpt.launch"] = BackgroundTracker(SupervisorLink())
        self._each("open", run, resume_step)
        self._all = {"metrics.jsonl": metrics, **self._all}

    def views(self) -> list[str]:
        """Return the non-empty `view`s of the trackers in train.trackers. Call this before `close`.

        The result may omit the view of a tracker that is still opening or cannot be opened.
        """
        found = self._all.values()
        return [t.view for t in found if isinstance(t, BackgroundTracker) and t.view]

    def log(self, record: Record) -> None:
        self._each("log", record)

    def rewind(self, step: int) -> None:
        self._each("rewind", step)

    def close(self) -> None:
        self._each("close")
        self._all.clear()

    def _each(self, method: str, *arguments: Any) -> None:
        for name, tracker in self._all.items():
            try:
                getattr(tracker, method)(*arguments)
            except Exception as error:  # an error in a tracker should not stop the run
                failed = f"warning: {name} failed: {in_words(error).rstrip('.')}{_origin(error)}"
                if method == "close":
                    self._say(f"{failed}; its output is incomplete")
                elif name not in self._failing:
                    is_dropped = isinstance(error, FallenBehind)
                    what_now = "new records are dropped" if is_dropped else "it will be retried"
                    self._say(f"{failed}; {what_now}")
                self._failing.add(name)
            else:
                if name in self._failing:
                    self._say(f"{name} works again")
                self._failing.discard(name)


def _origin(error: Exception) -> str:
    """Return ` (FILE, line N)` for a programming error, and "" for any other error."""
    if isinstance(error, OSError | UsageError):
        return ""
    *_, frame = traceback.extract_tb(error.__traceback__)
    return f" ({Path(frame.filename).name}, line {frame.lineno})"
