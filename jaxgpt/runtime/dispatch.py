"""Limit on the number of unfinished programs."""

from collections import deque
from typing import Any

import jax

LIMIT = 2  # programs; enough to keep the devices busy, and a run stops soon after a signal


class DispatchLimiter:
    """Limits the number of dispatched but unfinished programs to `LIMIT`.

    After 32 unfinished programs on a CPU device, XLA blocks the dispatching thread. The job
    deadlocks if the oldest program waits for a program on another device that this thread has not
    dispatched yet.
    """

    def __init__(self):
        self._results: deque[Any] = deque()

    def add(self, result: Any) -> None:
        """Register a program's result. Wait for the program dispatched `LIMIT` programs earlier.

        `result` is any output of the program: an array, or a tree of arrays. Raises the error of
        the earlier program if it failed.
        """
        self._results.append(result)
        if len(self._results) > LIMIT:
            jax.block_until_ready(self._results.popleft())
