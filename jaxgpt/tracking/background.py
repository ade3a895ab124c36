"""Trackers that cannot slow down a run, because each one runs in its own thread."""

import queue
import threading
from typing import Any

from jaxgpt.cluster.timeouts import ANSWER
from jaxgpt.tracking.records import Record

LIMIT = 1000  # maximum number of records that a tracker may be behind


class BackgroundTracker:
    """Runs a tracker in its own thread.

    Each method raises the error from the tracker's latest call if that call failed. If the tracker
    is `LIMIT` records behind, the new record is dropped and the method raises `TimeoutError`. The
    tracker continues to receive calls after an error. If its `open` fails, `open` is retried before
    the next call.
    """

    def __init__(self, tracker: Any):
        self._tracker = tracker
        self._todo: queue.Queue[tuple[str, tuple[Any, ...]]] = queue.Queue(LIMIT)
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def open(self, run: Any, resume_step: int | None) -> None:
        self._put("open", run, resume_step)
        self._check()

    def log(self, record: Record) -> None:
        self._put("log", record)
        self._check()

    def rewind(self, step: int) -> None:
        self._put("rewind", step)
        self._check()

    def close(self, seconds: float = ANSWER) -> None:
        """Write the remaining records, and wait for the thread to finish.

        Raises `TimeoutError` if it has not finished after `seconds`.
        """
        self._put("close")
        self._thread.join(seconds)
        if self._thread.is_alive():
            raise TimeoutError(f"it has not finished after {seconds:g} s")
        self._check()

    def _put(self, method: str, *arguments: Any) -> None:
        try:
            self._todo.put_nowait((method, arguments))
        except queue.Full:
            raise TimeoutError(f"it is {LIMIT} records behind") from None

    def _check(self) -> None:
        if self._error:
            raise self._error

    def _work(self) -> None:
        method, unopened = "", None
        while method != "close":
            method, arguments = self._todo.get()
            try:
                if method == "open":
                    unopened = arguments
                if unopened is not None:
                    self._tracker.open(*unopened)
                    unopened = None
                if method != "open":
                    getattr(self._tracker, method)(*arguments)
                self._error = None
            except Exception as error:  # of any type: the next call raises it in the main thread
                self._error = error
