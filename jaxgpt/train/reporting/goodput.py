"""Goodput: the share of a run's wall time, over all its starts, that went into steps that count.

Every moment of a start is in one phase, and every moment between two starts is `down`, so that the
parts add up to the whole. A start that is killed leaves goodput.json, from which the next one takes
its record; what it had not written, `WRITE_SECONDS` at most, is `down`, too.
"""

import contextlib
import json
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxgpt.config import read_json
from jaxgpt.tracking.console import table_text
from jaxgpt.tracking.jsonl import METRICS, atomic_write_text, read_records
from jaxgpt.tracking.records import GOODPUT_SHAPE, GoodputRecord

FILE = "goodput.json"
WRITE_SECONDS = 5.0
PHASES = {  # in the order of a report
    "step": "steps that count",
    "lost": "steps that were trained again later, or left out by a rewind",
    "data": "steps waiting for data",
    "start": "processes, imports, devices, opening data and logs",
    "compile": "compiling the step",
    "restore": "the state to begin with, or to go back to",
    "evaluation": "evaluations and samples",
    "save": "steps waiting for checkpoints",
    "profile": "beginning and reading a trace",
    "end": "after the last step",
    "down": "between starts: the scheduler, a restart, what a killed start had not written",
}


class Goodput:
    """The clock of a start: seconds of each phase, and of each stretch of consecutive steps."""

    def __init__(self, began: float, directory: Path | None = None):
        """Go on from `began`, a Unix time, in the phase `start`.

        `directory` is that of the run, on process 0; elsewhere nothing is written.
        """
        self._began = self._since = began
        self._offset = time.time() - time.monotonic()  # a clock that is set must not move a phase
        self._phase = "start"
        self._seconds: dict[str, float] = {}
        self._stretches: list[list[float]] = []  # of each: from step, to step, seconds
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._path = directory and directory / FILE
        self.earlier: list[GoodputRecord] = []  # starts that may not be in metrics.jsonl yet
        if self._path is not None:
            self.earlier = read_starts(self._path)
            self._thread = threading.Thread(target=self._keep_writing, name="goodput", daemon=True)
            self._thread.start()

    def enter(self, phase: str) -> None:
        """End the phase that is under way, and begin another."""
        with self._lock:
            self._add_up()
            self._phase = phase

    @contextlib.contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """Count the block as a phase, then go on with the one before it."""
        before = self._phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def go_on_from(self, step: int) -> None:
        """Begin a stretch of steps after `step`."""
        with self._lock:
            self._add_up()
            self._stretches.append([step, step, 0.0])

    def reach(self, step: int) -> None:
        """Count the steps up to `step` as trained."""
        self._stretches[-1][1] = step

    def record(self) -> GoodputRecord:
        """Return the account of this start until now."""
        with self._lock:
            self._add_up()
            return GoodputRecord(
                step=int(self._stretches[-1][1]) if self._stretches else 0,
                began=self._began,
                ended=self._since,
                seconds=dict(self._seconds),
                stretches=[list(stretch) for stretch in self._stretches],
            )

    def _add_up(self) -> None:
        now = time.monotonic() + self._offset
        passed, self._since = now - self._since, now
        self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + passed
        if self._phase == "step":
            self._stretches[-1][2] += passed

    def _keep_writing(self) -> None:
        self._write()  # a start that is killed at once is one, too
        while not self._closed.wait(WRITE_SECONDS):
            self._write()

    def _write(self) -> None:
        starts = [one.to_dict() for one in (*self.earlier, self.record())]
        with contextlib.suppress(Exception):  # a disk without room is not worth a run
            atomic_write_text(self._path, json.dumps(starts) + "\n")

    def close(self) -> None:
        """Write goodput.json for the last time."""
        if self._path is not None and not self._closed.is_set():
            self._closed.set()
            self._thread.join()
            self._write()


def read_starts(path: Path) -> list[GoodputRecord]:
    """Return the starts in a goodput.json, none if it is not there or damaged."""
    try:
        return [_start(one) for one in read_json(path, [GOODPUT_SHAPE])]
    except (OSError, ValueError):
        return []


def all_starts(directory: Path) -> list[GoodputRecord]:
    """Return the starts of a run, oldest first, with the one that is under way."""
    metrics = directory / METRICS
    found = [_start(r) for r in read_records(metrics, GoodputRecord.kind)]
    found += read_starts(directory / FILE)
    newest = {one.began: one for one in sorted(found, key=lambda one: one.ended)}
    return [newest[began] for began in sorted(newest)]


def _start(record: dict[str, Any]) -> GoodputRecord:
    return GoodputRecord(**{key: record[key] for key in GOODPUT_SHAPE})


def account(starts: Sequence[GoodputRecord]) -> dict[str, float]:
    """Return the seconds of each phase over all starts, oldest first, with those between them.

    Steps are lost if a later stretch begins before them. All steps of a stretch count alike.
    """
    total = dict.fromkeys(PHASES, 0.0)
    for start in starts:
        for phase, seconds in start.seconds.items():
            total[phase] = total.get(phase, 0.0) + seconds
    for before, after in zip(starts, starts[1:], strict=False):
        total["down"] += max(0.0, after.began - before.ended)
    kept = float("inf")  # steps up to here are not trained again
    for first, last, seconds in reversed([s for start in starts for s in start.stretches]):
        left = max(first, kept)
        if last > left:
            lost = seconds * (last - left) / (last - first)
            total["lost"] += lost
            total["step"] -= lost
        kept = min(kept, first)
    return total


def goodput_line(starts: Sequence[GoodputRecord]) -> str:
    """Return the account of a run in a line for the log, the longest phases first."""
    total, n = account(starts), len(starts)
    parts = sorted(total.items(), key=lambda part: -part[1])
    text = ", ".join(f"{phase} {seconds:,.1f} s" for phase, seconds in parts if seconds >= 0.05)
    share = total["step"] / max(sum(total.values()), 1e-9)
    return f"goodput {100 * share:.1f} % over {n} start{'s' * (n > 1)}: {text}"


def goodput_table(starts: Sequence[GoodputRecord], width: int) -> str:
    """Return the account of a run as a table: phase, seconds, share."""
    total = account(starts)
    whole = sum(total.values())
    rows = [
        (phase, meaning, f"{total[phase]:,.1f}", f"{100 * total[phase] / whole:.1f} %")
        for phase, meaning in PHASES.items()
    ]
    rows.append(("all", f"starts: {len(starts)}", f"{whole:,.1f}", "100.0 %"))
    return table_text(("phase", "what", "seconds", "share"), rows, width, title="Goodput")
