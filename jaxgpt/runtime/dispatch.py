"""Limit on the number of programs in flight."""

from collections import deque
from typing import Any

import jax

LIMIT = 2  # programs; keeps the devices busy, but lets a run stop soon after a signal


class DispatchLimiter:
    """Limits the number of programs in flight to `LIMIT`.

    If a CPU device has 32 programs in flight, XLA blocks the dispatching thread. If the oldest
    program waits for another device's program that this thread has not yet dispatched, the job
    deadlocks.
    """

    def __init__(self):
        self._results: deque[Any] = deque()

    def add(self, result: Any) -> None:
        """Register the newest program. `result` is its output, an array or a tree of arrays.

        The caller must not donate or delete `result`. If more than `LIMIT` programs are registered,
        this waits for the oldest program. Raises `jax.errors.JaxRuntimeError` if that program
        failed.
        """
        self._results.append(result)
        if len(self._results) > LIMIT:
            jax.block_until_ready(self._results.popleft())
