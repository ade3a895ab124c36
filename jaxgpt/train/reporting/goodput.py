"""Goodput: the fraction of a run's wall time, including restarts, spent on steps that were kept.

Each goodput record in metrics.jsonl shows how the time since the previous record was spent. After a
job fails or is killed, the time from its last record to the start of the next job counts as `down`.
If a job finishes or stops with a checkpoint, the time until the next job starts is not counted. A
job that is killed before it has restored the state leaves no record.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxgpt.perf.clock import ACTIVITIES, Clock
from jaxgpt.perf.units import count
from jaxgpt.tracking.console import table_text
from jaxgpt.tracking.jsonl import METRICS, read_records
from jaxgpt.tracking.records import GOODPUT_SHAPE, GoodputRecord

WRITE_SECONDS = 5.0  # `reach` waits this long, or 1/1000 of the elapsed time if that is longer
TIMES = ACTIVITIES | {
    "lost": "steps that a rewind discarded or that were trained again",
    "down": "time between a killed job's last record and the start of the next job",
}


class Goodput:
    """Writes goodput records based on this process's clock."""

    def __init__(self, clock: Clock, step: int, log: Callable[[GoodputRecord], None]):
        """Start counting after `step`. Each record is passed to `log`."""
        self._clock, self._log = clock, log
        self._first = self.last = step  # step of the last record, and the current step
        self._logged: dict[str, float] = {}  # total seconds of each activity at the last record

    def continue_from(self, step: int) -> None:
        """Write a record, then continue counting after `step`, which may be an earlier step."""
        self.write()
        self._first = self.last = step

    def reach(self, step: int) -> None:
        """Count the steps up to `step` as trained, and write a record if one is due."""
        self.last = step
        elapsed = self._clock.elapsed()
        if elapsed - sum(self._logged.values()) > max(WRITE_SECONDS, elapsed / 1000):
            self.write()

    def write(self, is_last: bool = False) -> None:
        """Write a record. `is_last` is True if the run has finished or was told to stop."""
        before, now = self._logged, self._clock.seconds()
        spent = {name: seconds - before.get(name, 0.0) for name, seconds in now.items()}
        self._log(
            GoodputRecord(
                step=self.last,
                after=self._first,
                start=self._clock.began,
                began=self._clock.began + sum(before.values()),
                ended=self._clock.began + sum(now.values()),
                seconds={name: seconds for name, seconds in spent.items() if seconds > 0},
                is_last=is_last,
            )
        )
        self._first, self._logged = self.last, now


def read_goodput(directory: Path) -> list[GoodputRecord]:
    """Return the undamaged goodput records of a run, oldest first.

    Raises `OSError` if metrics.jsonl cannot be read.
    """
    return goodput_records(read_records(directory / METRICS, GoodputRecord.kind))


def goodput_records(found: Sequence[dict[str, Any]]) -> list[GoodputRecord]:
    """Convert dicts of kind `goodput` from metrics.jsonl to goodput records."""
    return [GoodputRecord(**{key: record[key] for key in GOODPUT_SHAPE}) for record in found]


def account(records: Sequence[GoodputRecord]) -> dict[str, float]:
    """Return the total seconds that a run spent on each activity, including `lost` and `down`.

    `records` must be sorted, oldest first. Steps count as `lost` instead of `step` if a later
    record starts from an earlier step. The step time of a record is divided equally among its
    steps.
    """
    total = dict.fromkeys(TIMES, 0.0)
    for record in records:
        for activity, seconds in record.seconds.items():
            total[activity] = total.get(activity, 0.0) + seconds
    for before, after in zip(records, records[1:], strict=False):
        if not before.is_last:
            total["down"] += max(0.0, after.began - before.ended)
    kept = float("inf")  # later records repeat all steps after step `kept`
    for record in reversed(records):
        first = max(record.after, kept)
        if record.step > first:
            share = (record.step - first) / (record.step - record.after)
            lost = record.seconds.get("step", 0.0) * share
            total["lost"] += lost
            total["step"] -= lost
        kept = min(kept, record.after)
    return total


def goodput_line(records: Sequence[GoodputRecord]) -> str:
    """Return a log line with a run's goodput and the seconds of each activity, longest first.

    Activities that took less than 0.05 s are omitted. `records` must be sorted, oldest first.
    """
    total, n = account(records), n_starts(records)
    parts = sorted(total.items(), key=lambda part: -part[1])
    text = ", ".join(f"{name} {seconds:,.1f} s" for name, seconds in parts if seconds >= 0.05)
    share = total["step"] / max(sum(total.values()), 1e-9)
    return f"goodput {100 * share:.1f} % over {count(n, 'start')}: {text}"


def goodput_table(records: Sequence[GoodputRecord], width: int) -> str:
    """Return a table with the seconds and the share of each activity.

    Lines have at most `width` characters. `records` must be sorted, oldest first. Activities
    that are not in `TIMES` have no row, but count toward the total.
    """
    total = account(records)
    whole = max(sum(total.values()), 1e-9)
    rows = [
        (name, meaning, f"{total[name]:,.1f}", f"{100 * total[name] / whole:.1f} %")
        for name, meaning in TIMES.items()
    ]
    rows.append(("all", f"starts: {n_starts(records)}", f"{whole:,.1f}", "100.0 %"))
    return table_text(("activity", "what", "seconds", "share"), rows, width, title="Goodput")


def n_starts(records: Sequence[GoodputRecord]) -> int:
    """Return how many starts of the run left a record."""
    return len({record.start for record in records})
