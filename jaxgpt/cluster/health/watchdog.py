"""Watchdog for jobs that hang: they end and say where, so that no node hours are wasted."""

import contextlib
import faulthandler
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxgpt.cluster.health.heartbeat import Heartbeats, Progress
from jaxgpt.cluster.shutdown import HUNG

START_MINUTES = 30  # that starting, restoring and compiling may take, if train.hang_timeout is less


class Watchdog:
    """Ends the job with status 70 if `heartbeat` is not called for too long.

    One process that stops holds up all others, so each writes down where it is.
    """

    def __init__(
        self,
        minutes: float | None,
        directory: Path,
        rank: int,
        end: Callable[[str, int], Any],
        peers: Heartbeats,
    ):
        """Watch from the first heartbeat on, if `minutes` is not None.

        `end` ends the job, given an error message and an exit status; hang-<rank>.txt is written
        to `directory`. Where `peers` knows of a silent process, it is for `peers` to end the job.
        """
        self._minutes = minutes
        self._file = directory / f"hang-{rank}.txt"
        self._rank = rank
        self._end_job = end
        self.peers = peers
        self._progress = Progress()
        self._last: tuple[float, float] | None = None  # the time, and the minutes it may take
        self._stop = threading.Event()
        peers.on_silence, peers.own_progress = self._write_stacks, lambda: self._progress

    def heartbeat(self, activity: str, min_minutes: float = 0) -> None:
        """Report progress; `activity` begins, and may take `min_minutes` in any case."""
        begins = self._last is None
        self._progress = Progress(self._progress.number + 1, activity)
        self._last = (time.monotonic(), max(min_minutes, self._minutes or 0))
        if begins and self._minutes is not None:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def close(self) -> None:
        self._stop.set()

    def _watch(self) -> None:
        interval = min(60 * self._minutes / 4, 5)
        while not self._stop.wait(interval):
            since, minutes = self._last
            if time.monotonic() - since > 60 * minutes and not self.peers.silent():
                self._write_stacks()
                # For the others to notice and to write, too. Process 0 knows most, and speaks.
                time.sleep((2 if self._rank == 0 else 3) * interval)
                report = (
                    f"error: train.hang_timeout={self._minutes}: no progress for longer than "
                    f"{minutes:g} minutes: {self.peers.who_waits([])}; {self._file} says where, "
                    "that of each process; start again with the same --out\n"
                )
                self._end_job(report, HUNG)

    def _write_stacks(self) -> None:
        """Write where each thread is; in a thread, as the file system may be what hangs."""
        threading.Thread(target=self._write, daemon=True).start()

    def _write(self) -> None:
        with contextlib.suppress(OSError), self._file.open("w") as file:
            faulthandler.dump_traceback(file, all_threads=True)
