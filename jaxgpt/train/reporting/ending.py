"""The last lines of a run's log."""

import importlib.util
import shlex
from collections.abc import Sequence
from pathlib import Path

from jaxgpt.tracking.jsonl import METRICS, read_records

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 30  # maximum number of bars in a sparkline; the line then usually fits 80 columns


def ending_lines(directory: Path, views: Sequence[str]) -> list[str]:
    """Return the last lines: sparklines, locations of the log and the curves, and a report command.

    The sparklines show the loss and the throughput. A sparkline is omitted if there are fewer than
    two values. `views` is the result of `Trackers.views`. Raises `OSError` if metrics.jsonl cannot
    be read.
    """
    rows = [("log", str(directory / "train.log"))]
    rows += [("curves", view) for view in views]
    text = "" if importlib.util.find_spec("bokeh") else " --text"  # pages need Bokeh
    rows.append(("report", f"python -m jaxgpt.report {shlex.quote(str(directory))}{text}"))
    records = [r for r in read_records(directory / METRICS, "train") if not r["skipped"]]
    for name, key, text in (
        ("tokens/s", "tokens_per_sec", "{:,.0f}".format),
        ("loss", "loss", "{:.4f}".format),
    ):
        values = [r[key] for r in records if r.get(key) is not None]
        if len(values) > 1:
            first, last = text(values[0]), text(values[-1])
            steps = f"steps {records[0]['step']:,} to {records[-1]['step']:,}"
            rows.insert(0, (name, f"{first} {sparkline(values)} {last}  {steps}"))
    return [f"{name:8}  {row}" for name, row in rows]


def sparkline(values: Sequence[float]) -> str:
    """Return a row of at most `WIDTH` bars.

    If there are more than `WIDTH` values, each bar shows the mean of one or more consecutive
    values. `values` must be finite and not empty.
    """
    n = min(WIDTH, len(values))
    edges = [i * len(values) // n for i in range(n + 1)]
    parts = [values[a:b] for a, b in zip(edges, edges[1:], strict=False)]
    means = [sum(part) / len(part) for part in parts]
    low, high = min(means), max(means)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((mean - low) * scale)] for mean in means)
