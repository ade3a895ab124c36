"""The doctor's report: line by line for a person, or one JSON object at the end."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxgpt.cluster.process_group import ProcessGroup
from jaxgpt.doctor.checks import Check
from jaxgpt.doctor.collectives import (
    COLLECTIVES,
    SIZES,
    Measurement,
    gigabytes,
    milliseconds,
)
from jaxgpt.perf.units import format_bytes

COLORS = {"OK": "green", "WARN": "yellow", "FAIL": "red"}
WIDTH = 112  # where there is no terminal to ask


class Report:
    """Prints on process 0 as checks come in; silent on the others, and with `as_json` until the
    end."""

    def __init__(self, cluster: ProcessGroup, as_json: bool, job: dict[str, Any]):
        """Take `job`, which goes into the JSON object as it is."""
        self.checks: list[Check] = []
        self.measurements: list[Measurement] = []
        self.job = job
        self._enabled, self._as_json = cluster.is_main, as_json
        # Open MPI gives processes a terminal even when its own output goes to a file.
        self._on_terminal = cluster.size == 1 and sys.stdout.isatty()
        self._console = Console(
            force_terminal=self._on_terminal, width=None if self._on_terminal else WIDTH
        )

    @property
    def failed(self) -> bool:
        return any(check.status == "FAIL" for check in self.checks)

    def section(
        self, title: str, checks: Sequence[Check], measurements: Sequence[Measurement] = ()
    ) -> None:
        """Add checks, and the times of collectives over one axis."""
        self.checks += checks
        self.measurements += measurements
        if not self._enabled or self._as_json:
            return
        self._console.print(Text(title, style="bold"))
        if self._on_terminal:
            self._console.print(_lines_in_columns(checks))
        else:
            for check in checks:
                print(f"{check.status:4} {check.name}: {check.finding}")
                if check.remedy:
                    print(f"     remedy: {check.remedy}")
        if measurements:
            self._console.print(_times(measurements))
            if len(measurements) < len(COLLECTIVES) * len(SIZES):
                print("- was left out: it failed before, or would have taken too long")
        print(flush=True)

    def close(self) -> None:
        """Print the number of checks by status, or the JSON object."""
        if not self._enabled:
            return
        counts = {s: sum(c.status == s for c in self.checks) for s in COLORS}
        if self._as_json:
            result = {
                "status": next(s for s in ("FAIL", "WARN", "OK") if counts[s] or s == "OK"),
                "job": self.job,
                "checks": [asdict(check) for check in self.checks],
                "collectives": [asdict(m) for m in self.measurements],
            }
            print(json.dumps(result, indent=1), flush=True)
        else:
            print(", ".join(f"{n} {status}" for status, n in counts.items()), flush=True)


def _lines_in_columns(checks: Sequence[Check]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 0))
    for check in checks:
        finding = Text(check.finding)
        if check.remedy:
            finding.append(f"\nremedy: {check.remedy}", style="bold")
        table.add_row(Text(check.status, style=COLORS[check.status]), check.name, finding)
    return table


def _times(measurements: Sequence[Measurement]) -> Table:
    """Return latency, and bus bandwidth by size; `-` for what would take too long."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("bus bandwidth, GB/s, at")
    for heading in (*map(format_bytes, SIZES), f"time at {format_bytes(SIZES[0])}"):
        table.add_column(heading, justify="right")
    for collective in COLLECTIVES:
        mine = {m.bytes: m for m in measurements if m.collective == collective.name}
        found = [mine[size].bus_bandwidth if size in mine else None for size in SIZES]
        seconds = mine[SIZES[0]].seconds
        table.add_row(
            collective.name,
            *(gigabytes(b) if b else "-" for b in found),
            milliseconds(seconds) if seconds else "-",
        )
    return table
