"""How long a run takes from the start of its process to the end of its first step."""

import os
import time


def process_start_time() -> float:
    """Unix time at which this process started; now, where /proc does not tell."""
    try:
        with open("/proc/self/stat") as f:
            ticks = int(f.read().rpartition(")")[2].split()[19])
        with open("/proc/uptime") as f:
            uptime = float(f.read().split()[0])
        return time.time() - uptime + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return time.time()


class Startup:
    """Seconds that each phase took, in the order in which they ended."""

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self._start = self._last = process_start_time()

    def mark(self, phase: str) -> None:
        """A phase ends now; it began where the one before it ended."""
        now = time.time()
        self.seconds[phase] = now - self._last
        self._last = now

    @property
    def total(self) -> float:
        """Seconds from the start of the process to the last mark."""
        return self._last - self._start

    def __str__(self) -> str:
        phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.seconds.items())
        return f"start-up: {self.total:.1f} s from process start to first step ({phases})"
