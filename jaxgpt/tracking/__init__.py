"""Trackers: where the records of a run go."""

import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from jaxgpt.cluster.environment import SUPERVISOR
from jaxgpt.config import UsageError
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
    """All trackers of a run. One that fails is dropped with a warning; the run goes on."""

    def __init__(self, run: Any, resume_step: int | None, warn: Callable[[str], None]):
        """Open metrics.jsonl, which a run goes on from, samples.txt and the rest.

        Raises `UsageError` if metrics.jsonl cannot be written.
        """
        self._warn = warn
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
        for name, tracker in list(self._all.items()):
            try:
                getattr(tracker, method)(*arguments)
            except Exception as error:  # whatever it is, it is not worth a run
                del self._all[name]
                self._warn(
                    f"warning: {name} stopped: {str(error) or type(error).__name__}; the run goes "
                    "on without it, until it is started again"
                )
