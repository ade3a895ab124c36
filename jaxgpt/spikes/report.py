"""Console lines, a table and a plot of a run's spikes, skips and rewinds."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxgpt.config import UsageError, in_words
from jaxgpt.spikes.skip import SkipRanges
from jaxgpt.tracking.console import table_text

SHOWN_ROWS = 2


def spike_line(record: dict[str, Any]) -> str:
    """Return the console line about a spike, given its `SpikeRecord.to_dict()`."""
    text = (
        f"step={record['step']} spike ({record['cause']}): loss={record['loss']:.4f} "
        f"gnorm={record['grad_norm']:.3f}"
    )
    if "limit" in record:
        text += f" limit={record['limit']:.4g} median={record['median']:.4g}"
    return f"{text} action={record['action']} rows {_rows_text(record['rows'])}"


def rewind_line(rewind: dict[str, Any]) -> str:
    """Return the console line about a rewind, in the format of `read_rewinds`."""
    (first, last), (from_, to) = rewind["dropped"], rewind["skip"]
    return (
        f"rewound to step {rewind['to']} because of the spike at step {rewind['spike']}: steps "
        f"{first}-{last} are dropped, and the batches of steps {from_}-{to} will be skipped"
    )


def _rows_text(rows: list[dict[str, Any]]) -> str:
    """Return the numbers, corpora and offsets of the first `SHOWN_ROWS` rows as text.

    `rows` has the format of `worst_rows`.
    """
    shown = [f"{r['row']} ({r['corpus']} @{r['offset']})" for r in rows[:SHOWN_ROWS]]
    return ", ".join(shown) + (", ..." if len(rows) > SHOWN_ROWS else "")


def skipped_ranges(records: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """Return the (first, last) steps of each range that was skipped, given a run's records."""
    steps = [r["step"] for r in records if r["kind"] == "train" and r["skipped"]]
    return list(SkipRanges((step, step) for step in steps).ranges)


def spikes_table(records: list[dict[str, Any]]) -> str:
    """Return a table of the spikes, skips and rewinds in a run's records, sorted by step.

    If there are none, return a line that says so.
    """
    rows = sorted(_rows(records), key=lambda row: row[0])
    if not rows:
        return "no spikes, skips or rewinds"
    headings = ("step", "event", "loss", "limit", "grad norm", "what was done", "worst rows")
    cells = ((str(step), *rest) for step, *rest in rows)
    return table_text(headings, cells, 160, title="Spikes, skips and rewinds")


def _rows(records: list[dict[str, Any]]) -> Iterator[tuple[Any, ...]]:
    for r in records:
        if r["kind"] not in ("spike", "rewind"):
            continue
        step, done = r["step"], r.get("action", "")
        if r["kind"] == "rewind":
            (first, last), (from_, to) = r["dropped"], r["skip"]
            step = r["spike"]
            done = f"rewound to step {r['step']}, dropped {first}-{last}, skipped {from_}-{to}"
        values = (r["loss"], r.get("limit"), r["grad_norm"])
        numbers = ("-" if value is None else f"{value:.4g}" for value in values)
        yield step, f"spike: {r['cause']}", *numbers, done, _rows_text(r["rows"])
    for first, last in skipped_ranges(records):
        yield first, "skip", "", "", "", f"{first}-{last} skipped", ""


def draw_spikes(records: list[dict[str, Any]], title: str, path: Path) -> None:
    """Plot the loss curve of a run's records, with its spikes, skips and rewinds, to a file.

    The extension of `path` sets the format; without one, `.png` is appended. Raises `UsageError` if
    matplotlib is not installed or does not know the format, or if the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError(
            f"--png={path}: needs matplotlib; pip install 'jaxgpt[report]' installs it"
        ) from None
    train, evals, spikes, rewinds = (
        [r for r in records if r["kind"] == kind] for kind in ("train", "eval", "spike", "rewind")
    )
    figure = Figure(figsize=(10, 5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(*_curve(train, "loss"), color="C0", linewidth=1, label="loss")
    if evals:
        axes.plot(*_curve(evals, "val_loss"), "o-", color="C1", label="val loss")
    for first, last in skipped_ranges(records):
        axes.axvspan(first - 0.5, last + 0.5, color="0.85", zorder=0)
    for r in rewinds:  # plot the dropped steps, with an arrow to the step that the run went back to
        dropped = dict([*r["dropped_losses"], [r["spike"], r["loss"]]])
        axes.plot(*np.array(sorted(dropped.items()), float).T, ":", color="C3", linewidth=1)
        ends = {"xy": (r["step"], r["loss"]), "xytext": (r["spike"], r["loss"])}
        axes.annotate("", **ends, arrowprops={"arrowstyle": "->", "color": "C3"})
        axes.axvline(r["step"], color="C3", linewidth=0.5, linestyle="--")
    for cause, marker in (("loss", "v"), ("grad_norm", "d"), ("nonfinite", "x")):
        found = [r for r in (*spikes, *rewinds) if r["cause"] == cause]
        if found:
            steps = [r.get("spike", r["step"]) for r in found]
            heights = [axes.get_ylim()[0] if r["loss"] is None else r["loss"] for r in found]
            axes.scatter(steps, heights, marker=marker, color="C3", label=f"spike: {cause}")
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=title)
    axes.legend()
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"--png={path}: cannot be written ({in_words(error)}); give a path that ends in .png, "
            "in a writable folder"
        ) from None


def _curve(records: list[dict[str, Any]], name: str) -> tuple[list[int], np.ndarray]:
    """Return the steps and values of a curve; a value of None becomes NaN, which leaves a gap."""
    return [r["step"] for r in records], np.array([r[name] for r in records], float)
