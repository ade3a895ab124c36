"""Seconds in which a process was not run at all: stopped, throttled by its cgroup, or swapped out.

A thread sleeps for a moment, again and again, and adds up how late it wakes. It costs 0.1 % of a
core. A process that shares its cores with others is late by less than `NOTICED`.
"""

import threading
import time

SLEEP = 0.04
NOTICED = 0.02


class Stalls:
    """A clock that runs while this process does not."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._closed = False
        threading.Thread(target=self._watch, name="stalls", daemon=True).start()

    def close(self) -> None:
        self._closed = True

    def _watch(self) -> None:
        began = time.perf_counter()
        while not self._closed:
            time.sleep(SLEEP)
            now = time.perf_counter()
            late, began = now - began - SLEEP, now
            if late > NOTICED:
                self.seconds += late
