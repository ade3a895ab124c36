"""Trackers: where the records of a run go."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from jaxgpt.config import Config, UsageError
from jaxgpt.tracking.background import BackgroundTracker
from jaxgpt.tracking.jsonl import JsonLines
from jaxgpt.tracking.records import Record
from jaxgpt.tracking.samples import Samples
from jaxgpt.tracking.tensorboard import TensorBoard


class TrackedRun(Protocol):
    """What a tracker may know of a run."""

    directory: Path
    config: Config


class Tracker(Protocol):
    """A destination for records. All methods run on process 0, in one thread."""

    def open(self, run: TrackedRun, resume_step: int | None) -> None:
        """Begin, or go on after the checkpoint of `resume_step`; later steps will come again."""

    def log(self, record: Record) -> None:
        """Take one record: `record.to_dict()` has its `kind`, its `step` and its values."""

    def rewind(self, step: int) -> None:
        """Drop all steps after `step`: they will come again."""

    def close(self) -> None:
        """Write what is not written yet."""


TRACKERS: dict[str, Callable[[], Tracker]] = {
    "tensorboard": TensorBoard,
}
"""The values of train.trackers. metrics.jsonl, samples.txt and the console are always there."""


def check_trackers(names: Sequence[str]) -> None:
    """Check the names in train.trackers.

    Raises:
        UsageError: if one is unknown.
    """
    for name in names:
        if name and name not in TRACKERS:
            raise UsageError(f"train.trackers={name}: unknown; known are {', '.join(TRACKERS)}")


class Trackers:
    """All trackers of a run. One that fails is dropped with a warning; the run goes on."""

    def __init__(self, run: TrackedRun, resume_step: int | None, warn: Callable[[str], None]):
        """Open metrics.jsonl, samples.txt, and the trackers of train.trackers.

        Raises:
            UsageError: if metrics.jsonl cannot be written: it is what a run goes on from.
        """
        self._warn = warn
        self._all: dict[str, Tracker] = {"metrics.jsonl": JsonLines()}
        self._all["metrics.jsonl"].open(run, resume_step)
        self._all["samples.txt"] = Samples()
        for name in filter(None, run.config.train.trackers):
            self._all[name] = BackgroundTracker(name, TRACKERS[name](), warn)
        self._each("open", *list(self._all)[1:], arguments=(run, resume_step))

    def log(self, record: Record) -> None:
        self._each("log", *self._all, arguments=(record,))

    def rewind(self, step: int) -> None:
        self._each("rewind", *self._all, arguments=(step,))

    def close(self) -> None:
        self._each("close", *self._all)
        self._all.clear()

    def _each(self, method: str, *names: str, arguments: tuple[Any, ...] = ()) -> None:
        for name in names:
            try:
                getattr(self._all[name], method)(*arguments)
            except Exception as error:  # whatever it is, it is not worth a run
                del self._all[name]
                self._warn(
                    f"warning: {name} stopped: {str(error) or type(error).__name__}; the run goes "
                    "on without it, until it is started again"
                )
