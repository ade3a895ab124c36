"""Stopping a run between two steps: on a signal, or at a time limit."""

import atexit
import signal
import time
from collections.abc import Callable
from types import FrameType

from jaxgpt.cluster.environment import rank_from_env

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGALRM)  # that stop a run after a step


class StopSignal:
    """SIGTERM, SIGINT or a time limit, turned into a step at which all processes stop."""

    def __init__(
        self,
        time_limit_minutes: float | None = None,
        passed: float = 0.0,
        sync_point: Callable[[int, bool], bool | None] = lambda step, requested: None,
    ):
        """Catch signals from now on, `passed` seconds after the time limit began.

        `sync_point` takes a step and whether this process was first asked to stop before it, and
        returns whether all processes stop after it; None where this is the only process.
        """
        self.reason: str | None = None
        self._sync_point = sync_point
        self._forwarded = False
        self._since = time.monotonic()
        for number in SIGNALS:
            signal.signal(number, self._receive)
            # Ignore what comes when all is done: Python would go back to being killed.
            atexit.register(signal.signal, number, signal.SIG_IGN)
        if time_limit_minutes is not None and rank_from_env() == 0:
            signal.setitimer(signal.ITIMER_REAL, max(0.01, 60 * time_limit_minutes - passed))

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if number == signal.SIGINT and self.reason and now - self._since > 2:
            raise KeyboardInterrupt  # asked twice: leave without a checkpoint
        self._since = now
        self.reason = "time limit" if number == signal.SIGALRM else signal.Signals(number).name

    def reached(self, step: int) -> bool:
        """Return whether all processes stop after `step`, the furthest one's when it was asked."""
        requested = self.reason is not None and not self._forwarded
        agreed = self._sync_point(step, requested)
        if agreed is None:
            return self.reason is not None
        self._forwarded |= requested
        return agreed
