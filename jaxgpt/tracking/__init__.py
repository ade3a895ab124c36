"""Trackers: where the records of a run go."""

import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from jaxgpt.cluster.environment import SUPERVISOR
from jaxgpt.config import UsageError, in_words
from jaxgpt.tracking.background import BackgroundTracker
from jaxgpt.tracking.jsonl import JsonLines, Samples
from jaxgpt.tracking.records import Record
from jaxgpt.tracking.supervisor import SupervisorLink
from jaxgpt.tracking.tensorboard import TensorBoard


class Tracker(Protocol):
    """A destination for records. All methods run on process 0, in one thread."""

    def open(self, run: Any, resume_step: int | None) -> None:
        """Begin, or go on after the checkpoint of `resume_step`; later steps will come again.

        A run has a `directory` and a `config`.
        """

    def log(self, record: Record) -> None:
        """Take one record: `record.to_dict()` has its `kind`, its `step` and its values."""

    def rewind(self, step: int) -> None:
        """Drop all steps after `step`: they will come again."""

    def close(self) -> None:
        """Write what is not written yet."""


# The values of train.trackers. metrics.jsonl, samples.txt and the console are always there.
TRACKERS: dict[str, Callable[[], Tracker]] = {
    "tensorboard": TensorBoard,
}


def check_trackers(names: Sequence[str]) -> None:
    """Raise a UsageError if a name in train.trackers is unknown."""
    for name in names:
        if name not in TRACKERS:
            raise UsageError(f"train.trackers={name}: unknown; known are {', '.join(TRACKERS)}")


class Trackers:
    """All trackers of a run. A call that fails is a warning, and the next call tries again."""

    def __init__(self, run: Any, resume_step: int | None, say: Callable[[str], None]):
        """Open metrics.jsonl, which a run goes on from, samples.txt and the rest.

        Raises `UsageError` if metrics.jsonl cannot be written.
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
            except Exception as error:  # whatever it is, it is not worth a run
                failed = f"warning: {name} failed: {in_words(error)}"
                if method == "close":
                    self._say(f"{failed}; it is incomplete")
                elif name not in self._failing:
                    self._say(f"{failed}; the next record tries again")
                self._failing.add(name)
            else:
                if name in self._failing:
                    self._say(f"{name} works again")
                self._failing.discard(name)
