"""A bound on how far a process runs ahead of its devices."""

from collections import deque
from typing import Any

import jax

LIMIT = 16  # programs; more than enough for a device never to wait for the host


class DispatchLimiter:
    """Keeps the number of dispatched, unfinished programs within `LIMIT`.

    XLA lets 32 be under way on a CPU device; the thread that waits to dispatch the next one can
    be the one that has to begin what the first waits for, on another device, for ever.
    """

    def __init__(self):
        self._results: deque[Any] = deque()

    def add(self, result: Any) -> None:
        """Take what a program that was just dispatched returns; may wait for an older one."""
        self._results.append(result)
        if len(self._results) > LIMIT:
            jax.block_until_ready(self._results.popleft())
