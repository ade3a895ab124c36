"""Clock that measures how long each process of a run spends on each activity.

A process has exactly one activity at a time, so the seconds of all activities add up to the time
since the process started. The start-up report (`perf/startup.py`), the time per step
(`StepTimer` in `perf/flops.py`) and goodput (`train/reporting/goodput.py`) all read this clock.
"""

import contextlib
import os
import time
from collections.abc import Iterator

ACTIVITIES = {  # in start-up order
    "imports": "starting Python and importing packages",
    "distributed init": "connecting the processes",
    "prepare": "opening the run directory and the data",
    "devices": "starting the devices",
    "setup": "building the training step and opening the logs",
    "state": "initializing or restoring the state",
    "compile": "compiling the training step",
    "step": "training steps",
    "data": "training steps waiting for data",
    "evaluation": "evaluations and samples",
    "save": "training steps waiting for checkpoints",
    "profile": "starting and reading a trace",
}


def process_start_time() -> float:
    """Return the Unix time when this process started, or the current time if that is unknown."""
    try:
        with open("/proc/self/stat") as f:
            ticks = int(f.read().rpartition(")")[2].split()[19])
        uptime = time.clock_gettime(time.CLOCK_BOOTTIME)  # in a container, /proc/uptime may differ
        return time.time() - uptime + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):  # not Linux
        return time.time()


class Clock:
    """Seconds that this process has spent on each of the `ACTIVITIES`."""

    def __init__(self, began: float | None = None):
        """Start the activity `imports` at Unix time `began` or, if None, `process_start_time()`."""
        self.began = process_start_time() if began is None else began
        self._activity = "imports"
        self._seconds: dict[str, float] = {}
        # Use monotonic time, so that setting the system clock cannot change a duration.
        self._since = time.monotonic() - (time.time() - self.began)

    def enter(self, activity: str) -> None:
        """End the current activity and begin one of the `ACTIVITIES`."""
        assert activity in ACTIVITIES, activity
        self._update()
        self._activity = activity

    @contextlib.contextmanager
    def within(self, activity: str) -> Iterator[None]:
        """Switch to an activity for the duration of this block, then return to the previous one."""
        before = self._activity
        self.enter(activity)
        try:
            yield
        finally:
            self.enter(before)

    def seconds(self) -> dict[str, float]:
        """Return the seconds spent on each activity so far, in order of first occurrence.

        Activities that have not occurred are left out.
        """
        self._update()
        return dict(self._seconds)

    def spent(self, *activities: str) -> float:
        """Return the total seconds spent on the given activities so far."""
        self._update()
        return sum(self._seconds.get(activity, 0.0) for activity in activities)

    def elapsed(self) -> float:
        """Return the seconds since `began`."""
        return sum(self.seconds().values())

    def _update(self) -> None:
        now = time.monotonic()
        self._seconds[self._activity] = self._seconds.get(self._activity, 0.0) + now - self._since
        self._since = now
