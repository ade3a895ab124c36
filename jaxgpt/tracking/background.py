"""A separate thread for each tracker, so that trackers cannot slow down a run."""

import itertools
import queue
import threading
from typing import Any

from jaxgpt.cluster.timeouts import ANSWER
from jaxgpt.perf.units import count
from jaxgpt.tracking.records import Record

LIMIT = 1000  # maximum number of records that may wait for a tracker
PAUSE = ANSWER / 2  # seconds between attempts; must be shorter than the wait in `close`
ATTEMPTS = 20  # maximum number of attempts to log a record; they take at least 95 s


class FallenBehind(TimeoutError):
    """Raised if a record is dropped because `LIMIT` older records are still waiting."""


class BackgroundTracker:
    """Runs a tracker in its own thread.

    A failed call is retried every `PAUSE` seconds, and newer calls wait in a queue. A record is
    dropped after `ATTEMPTS` failures. While calls fail, `open`, `log` and `rewind` queue their call
    and then raise the tracker's latest error. If the tracker is `LIMIT` records behind, `log` drops
    the record and raises `FallenBehind`. Goodput records between a rewind and the next training
    record are also dropped.
    """

    def __init__(self, tracker: Any):
        self._tracker = tracker
        self._todo: queue.Queue[tuple[str, tuple[Any, ...]]] = queue.Queue()
        self._closing = threading.Event()
        self._error: Exception | None = None
        self._has_rewound = False  # since the last training record
        self._n_lost = 0  # dropped records
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    @property
    def view(self) -> str:
        """Return the `view` of the tracker, or "" if the tracker has no view."""
        return getattr(self._tracker, "view", "")

    def open(self, run: Any, resume_step: int | None) -> None:
        self._put("open", run, resume_step)

    def log(self, record: Record) -> None:
        if record.kind == "train":
            self._has_rewound = False
        if record.kind == "goodput" and self._has_rewound:
            self._check()
            return  # the rewind may have dropped the steps of this record
        if self._todo.qsize() >= LIMIT:
            self._n_lost += 1
            raise FallenBehind(f"it is {LIMIT} records behind")
        self._put("log", record)

    def rewind(self, step: int) -> None:
        self._has_rewound = True
        self._put("rewind", step)

    def close(self, seconds: float = ANSWER) -> None:
        """Write the remaining records, and wait for the thread to finish.

        A call that is being retried gets one more attempt, and each later call gets one attempt.
        After a failed `open` or `rewind`, later calls are dropped. Raises `TimeoutError` if the
        thread has not finished after `seconds`, the tracker's error if its last call failed, and
        `OSError` if records were lost.
        """
        self._closing.set()
        self._todo.put(("close", ()))
        self._thread.join(seconds)
        if self._thread.is_alive():
            raise TimeoutError(f"it has not finished after {seconds:g} s")
        self._check()
        if self._n_lost:
            raise OSError(f"it lost {count(self._n_lost, 'record')}")

    def _put(self, method: str, *arguments: Any) -> None:
        self._todo.put((method, arguments))
        self._check()

    def _check(self) -> None:
        if self._error:
            raise self._error

    def _work(self) -> None:
        method = ""
        while method != "close":
            method, arguments = self._todo.get()
            for attempt in itertools.count(1):
                is_last = self._closing.is_set() or (method == "log" and attempt == ATTEMPTS)
                if self._succeeds(method, arguments):
                    break
                if is_last:
                    if method == "log":
                        self._n_lost += 1
                        break
                    return  # after a failed `open` or `rewind`, further calls are unsafe
                self._closing.wait(PAUSE)

    def _succeeds(self, method: str, arguments: tuple[Any, ...]) -> bool:
        try:
            getattr(self._tracker, method)(*arguments)
            self._error = None
        except Exception as error:  # the next call raises it in the main thread
            self._error = error
        return self._error is None
