"""Trackers that cannot slow a run: each in a thread, and dropped when it fails or falls behind."""

import queue
import threading
from collections.abc import Callable
from typing import Any

from jaxgpt.tracking.records import Record

LIMIT = 1000  # records that a tracker may fall behind
CLOSE_SECONDS = 10.0  # that a run waits for a tracker at its end


class BackgroundTracker:
    """Runs a tracker in a thread of its own. If it fails or hangs, warns once and drops it."""

    def __init__(self, name: str, tracker: Any, warn: Callable[[str], None]):
        self._name, self._tracker, self._warn = name, tracker, warn
        self._todo: queue.Queue[tuple[str, tuple[Any, ...]] | None] = queue.Queue(LIMIT)
        self._error = ""
        self._is_dropped = False
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def open(self, run: Any, resume_step: int | None) -> None:
        self._put("open", run, resume_step)

    def log(self, record: Record) -> None:
        self._put("log", record)

    def rewind(self, step: int) -> None:
        self._put("rewind", step)

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Write what is left, waiting at most so many seconds."""
        self._put("close")
        if self._is_dropped:
            return
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._drop(f"it has not finished after {seconds:g} s")
        elif self._error:
            self._drop(self._error)

    def _put(self, method: str, *arguments: Any) -> None:
        if self._is_dropped:
            return
        if self._error:
            self._drop(self._error)
            return
        try:
            self._todo.put_nowait((method, arguments))
        except queue.Full:
            self._drop(f"it is {LIMIT} records behind")

    def _drop(self, reason: str) -> None:
        self._is_dropped = True
        self._warn(
            f"warning: train.trackers={self._name} stopped: {reason}; the run goes on without it, "
            "until it is started again"
        )

    def _work(self) -> None:
        method = ""
        while method != "close":
            method, arguments = self._todo.get()
            try:
                getattr(self._tracker, method)(*arguments)
            except Exception as error:  # whatever it is, it is not worth a run
                self._error = str(error) or type(error).__name__
                return
