"""Stragglers: processes that hold up all others, found on process 0.

Collectives make all processes equally slow, so that the time of a step tells them apart by nothing
but what it is made of: the slow one works while the others wait for it. What is compared is a
process's own time: that of its host, data and dispatch, without waiting for devices, and the time
in which it was not run at all. A device that computes slowly is not seen.
"""

import json
from collections.abc import Sequence
from statistics import median

from jaxgpt.perf.flops import HostTimes
from jaxgpt.tracking.records import StragglerRecord

FACTOR = 1.3  # times the median
SHARE = 0.1  # of a step that a process needs more than the median: less costs nobody anything
INTERVALS = 3  # in a row


class Stragglers:
    """The processes of a job, compared with each other interval by interval."""

    def __init__(self, host_names: Sequence[str]):
        self._hosts = host_names
        self._words: dict[int, str] = {}  # of each process, when the last interval ended
        self._since: list[HostTimes] = []
        self._slow = [0] * len(host_names)  # intervals in a row
        self.own: list[float] = []  # own seconds per step of each process, in the last interval

    def compare(self, step: int, words: dict[int, str]) -> list[StragglerRecord]:
        """Return processes that have just been slow for `INTERVALS`; each is named once.

        `words` are the `HostTimes` of processes by rank, as JSON. An interval ends when there are
        newer ones of each.
        """
        ranks = range(len(self._hosts))
        if any(words.get(rank) in (None, self._words.get(rank)) for rank in ranks):
            return []
        self._words = dict(words)
        before, self._since = self._since, [HostTimes(*json.loads(words[r])) for r in ranks]
        pairs = list(zip(before, self._since, strict=False))
        if not pairs or any(then.steps >= now.steps for then, now in pairs):
            return []  # the first ones, or the clocks began anew

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
                self._slow[rank] = -(10**9)  # it has been named
                out.append(
                    StragglerRecord(
                        step=step, rank=rank, host=self._hosts[rank], own=own, median=typical,
                        data=data[rank], seconds=seconds,
                    )
                )  # fmt: skip
        return out


def straggler_line(record: dict[str, float | str]) -> str:
    """Return a straggler for the console."""
    own, typical = 1000 * record["own"], 1000 * record["median"]
    return (
        f"warning: process {record['rank']} on host {record['host']} is slow: at step "
        f"{record['step']} it needs {own:.1f} ms of its own a step, {1000 * record['data']:.1f} ms "
        f"of it for data; the median of all is {typical:.1f} ms, a step takes "
        f"{1000 * record['seconds']:.1f} ms"
    )
