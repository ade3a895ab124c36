"""Limit on how far a process runs ahead of its devices."""

from collections import deque
from typing import Any

import jax

LIMIT = 16  # programs; enough that a device never waits for the host


class DispatchLimiter:
    """Limits the number of dispatched but unfinished programs to `LIMIT`.

    XLA allows 32 unfinished programs on a CPU device, and then blocks the dispatching thread. The
    job deadlocks if the oldest program waits for a program on another device that this thread has
    not dispatched yet.
    """

    def __init__(self):
        self._results: deque[Any] = deque()

    def add(self, result: Any) -> None:
        """Register a program's result; wait for the program dispatched `LIMIT` programs earlier.

        `result` is any of the program's arrays, or a tree of them.
        """
        self._results.append(result)
        if len(self._results) > LIMIT:
            jax.block_until_ready(self._results.popleft())
