"""What a machine has proved: rows by stage, kept as JSON, shown as one Markdown table."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from jaxgpt.doctor.prove.goals import goal_of
from jaxgpt.tracking.jsonl import atomic_write_text

Status = Literal["done", "needs", "failed", "cut off", "running"]


@dataclass(frozen=True)
class Row:
    """One thing that was measured."""

    name: str
    value: float | str | None
    unit: str = ""
    note: str = ""
    goal: str = ""
    """What it should be; empty where nothing is asked for."""
    met: bool | None = None


@dataclass
class StageResult:
    """What one stage found, and how it ended."""

    stage: str
    status: Status = "running"
    reason: str = ""
    """Why it is not done: one sentence."""
    seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)

    def add(self, on_gpu: bool, name: str, value: Any, unit: str, note: str) -> Row:
        """Append a row, compared with its goal on this kind of device."""
        goal = goal_of(self.stage, name, on_gpu)
        met = None if goal is None else goal.is_met(value)
        self.rows.append(Row(name, value, unit, note, "" if goal is None else str(goal), met))
        return self.rows[-1]

    def write(self, folder: Path) -> None:
        """Write `result.json`, whole or not at all."""
        atomic_write_text(folder / "result.json", json.dumps(asdict(self), indent=1))


def read_result(folder: Path, stage: str) -> StageResult | None:
    """Return what a stage wrote into its folder; None if it has not begun."""
    try:
        values = json.loads((folder / "result.json").read_text())
        rows = [Row(**row) for row in values.pop("rows")]
        return StageResult(**values, rows=rows)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def shown(value: float | str | None, unit: str) -> str:
    """Return a value with its unit, in as many digits as matter."""
    if isinstance(value, str) or value is None:
        return "-" if value is None else value
    if unit == "%":
        return f"{value:.1%}"
    number = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{number} {unit}".strip()


def markdown(results: Sequence[StageResult], heading: str) -> str:
    """Return the table: a line for each row, and one for each stage that has none."""
    met = {None: "", True: "yes", False: "**no**"}
    lines = [heading, "", "| stage | what | value | goal | met |", "|---|---|---|---|---|"]
    for result in results:
        for row in result.rows:
            value = shown(row.value, row.unit) + (f" ({row.note})" if row.note else "")
            lines.append(line(result.stage, row.name, value, row.goal, met[row.met]))
        if result.status != "done":
            lines.append(line(result.stage, f"**{result.status}**", result.reason, "", ""))
    return "\n".join(lines) + "\n"


def line(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', '/').replace(chr(10), ' ') for cell in cells)} |"
