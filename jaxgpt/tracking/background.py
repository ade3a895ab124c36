"""Trackers that cannot slow a run: each works in a thread, and raises once it fails or hangs."""

import queue
import threading
from typing import Any

from jaxgpt.tracking.records import Record

LIMIT = 1000  # records that a tracker may fall behind
CLOSE_SECONDS = 10.0  # that a run waits for a tracker at its end


class BackgroundTracker:
    """Runs a tracker in a thread of its own; the next call raises what it raised."""

    def __init__(self, tracker: Any):
        self._tracker = tracker
        self._todo: queue.Queue[tuple[str, tuple[Any, ...]]] = queue.Queue(LIMIT)
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._work, daemon=True)
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
        self._thread.join(seconds)
        if self._thread.is_alive():
            raise TimeoutError(f"it has not finished after {seconds:g} s")
        if self._error:
            raise self._error

    def _put(self, method: str, *arguments: Any) -> None:
        if self._error:
            raise self._error
        try:
            self._todo.put_nowait((method, arguments))
        except queue.Full:
            raise TimeoutError(f"it is {LIMIT} records behind") from None

    def _work(self) -> None:
        method = ""
        while method != "close" and not self._error:
            method, arguments = self._todo.get()
            try:
                getattr(self._tracker, method)(*arguments)
            except Exception as error:  # of any tracker: `_put` raises it to the caller
                self._error = error
