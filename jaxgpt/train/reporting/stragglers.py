"""Straggler detection on process 0. A straggler is a process that slows down all others.

All processes have the same step time, because the others wait for the straggler in collectives.
Processes are therefore compared by their own time, which excludes waiting for devices. A process's
own time includes host work, waiting for data, and any time during which the process is suspended or
descheduled. A slow device is not detected.
"""

import json
from collections.abc import Sequence
from statistics import median

from jaxgpt.perf.flops import HostTimes
from jaxgpt.tracking.records import StragglerRecord

# A process is slow if its own time is more than `FACTOR` times the median, and exceeds the median
# by more than `SHARE` of the step time. A straggler is a process that is slow in `INTERVALS`
# consecutive intervals.
FACTOR = 1.3
SHARE = 0.1
INTERVALS = 3


class Stragglers:
    """Compares the processes after every interval."""

    def __init__(self, host_names: Sequence[str]):
        self._hosts = host_names
        self._messages: dict[int, str] = {}  # rank -> message, at the end of the last interval
        self._times: list[HostTimes] = []  # the same messages, decoded
        self._slow = [0] * len(host_names)  # consecutive slow intervals of each process
        self.own: list[float] = []  # each process's own seconds per step in the last interval

    def compare(self, step: int, messages: dict[int, str]) -> list[StragglerRecord]:
        """Return a record for each process that has just become a straggler.

        Each process is reported at most once. `messages` maps ranks to their `HostTimes` as JSON,
        in seconds. An interval ends when every process has sent new times. Until an interval ends,
        this returns an empty list.
        """
        ranks = range(len(self._hosts))
        if any(messages.get(rank) in (None, self._messages.get(rank)) for rank in ranks):
            return []
        self._messages = dict(messages)
        before, self._times = self._times, [HostTimes(*json.loads(messages[r])) for r in ranks]
        pairs = list(zip(before, self._times, strict=False))
        if not pairs or any(then.steps >= now.steps for then, now in pairs):
            return []  # this is the first interval, or the timers were reset

        def per_step(name: str) -> list[float]:
            return [
                (getattr(now, name) - getattr(then, name)) / (now.steps - then.steps)
                for then, now in pairs
            ]

        self.own, data, seconds = per_step("own"), per_step("data"), median(per_step("seconds"))
        typical = median(self.own)
        out = []
        for rank, own in enumerate(self.own):
            is_slow = own > max(FACTOR * typical, typical + SHARE * seconds)
            self._slow[rank] = self._slow[rank] + 1 if is_slow else min(self._slow[rank], 0)
            if self._slow[rank] == INTERVALS:
                self._slow[rank] = -(10**9)  # so that it never reaches `INTERVALS` again
                out.append(
                    StragglerRecord(
                        step=step, rank=rank, host=self._hosts[rank], own=own, median=typical,
                        data=data[rank], seconds=seconds,
                    )
                )  # fmt: skip
        return out


def straggler_line(record: dict[str, float | str]) -> str:
    """Return the console line of a straggler record."""
    own, typical = 1000 * record["own"], 1000 * record["median"]
    return (
        f"warning: process {record['rank']} on host {record['host']} is slow: at step "
        f"{record['step']} its own time is {own:.1f} ms per step, including "
        f"{1000 * record['data']:.1f} ms of waiting for data; the median of all processes is "
        f"{typical:.1f} ms, and a step takes {1000 * record['seconds']:.1f} ms"
    )
