"""The results of `prove`: rows of measurements and goals, as JSON and as a Markdown table."""

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from jaxgpt import __version__
from jaxgpt.config import UsageError
from jaxgpt.tracking.jsonl import atomic_write_text

Status = Literal["not run", "running", "done", "missing", "failed", "cut off"]


@dataclass(frozen=True)
class Row:
    """One measurement, and the goal that it should reach."""

    name: str
    value: float | str | None
    unit: str = ""
    note: str = ""
    goal: str = ""  # empty if there is none
    met: bool | None = None


@dataclass
class Result:
    """The rows of one check, and how it ended."""

    check: str
    status: Status = "not run"
    reason: str = ""  # why it is not done
    seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)


def read_results(out: Path, checks: Sequence[str]) -> dict[str, Result]:
    """Return the result of each check, from the folder's prove.json if there is one."""
    results, path = {name: Result(name) for name in checks}, out / "prove.json"
    try:
        out.mkdir(parents=True, exist_ok=True)
        for found in json.loads(path.read_text())["checks"] if path.exists() else []:
            rows = [Row(**row) for row in found.pop("rows")]
            results[found["check"]] = Result(**found, rows=rows)
        write_results(out, results)
    except OSError as error:
        raise UsageError(
            f"--out={out}: cannot be written ({error.strerror or error}); give a folder that can"
        ) from None
    except (ValueError, KeyError, TypeError):
        raise UsageError(f"{path}: is no result of prove; give another --out") from None
    return results


def write_results(out: Path, results: dict[str, Result]) -> None:
    """Write prove.json and prove.md."""
    devices = [row.value for r in results.values() for row in r.rows if row.name == "devices"]
    machine = f"jaxgpt {__version__} on {', '.join([platform.node(), *devices])}"
    values = {"machine": machine, "checks": [asdict(result) for result in results.values()]}
    atomic_write_text(out / "prove.json", json.dumps(values, indent=1))
    atomic_write_text(out / "prove.md", f"{machine}\n\n{markdown(list(results.values()))}")


def markdown(results: Sequence[Result]) -> str:
    """Return the table: a line for each row, and one for each check that is not done."""
    met = {None: "", True: "yes", False: "**no**"}
    lines = [["check", "what", "value", "goal", "met"], ["---"] * 5]
    for result in results:
        for row in result.rows:
            value = shown(row.value, row.unit) + (f" ({row.note})" if row.note else "")
            lines.append([result.check, row.name, value, row.goal, met[row.met]])
        if result.status != "done":
            lines.append([result.check, f"**{result.status}**", result.reason, "", ""])
    cells = [[cell.replace("|", "/").replace("\n", " ") for cell in line] for line in lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def shown(value: float | str | None, unit: str = "") -> str:
    """Return a value with its unit, rounded to four digits."""
    if isinstance(value, str) or value is None:
        return value or "-"
    if unit == "%":
        return f"{value:.1%}"
    number = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{number} {unit}".strip()
