"""Spikes, skips and rewinds of a run, from its metrics.jsonl: as lines, a table and a picture."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxgpt.config import UsageError

SHOWN_ROWS = 2


def spike_line(record: dict[str, Any]) -> str:
    """Return a spike for the console."""
    text = (
        f"step={record['step']} spike ({record['cause']}): loss={record['loss']:.4f} "
        f"gnorm={record['grad_norm']:.3f}"
    )
    if "limit" in record:
        text += f" limit={record['limit']:.4g} median={record['median']:.4g}"
    return f"{text} action={record['action']} rows {rows_text(record['rows'])}"


def rewind_line(rewind: dict[str, Any]) -> str:
    """Return a rewind of rewinds.json for the console."""
    (first, last), (from_, to) = rewind["dropped"], rewind["skip"]
    return (
        f"rewound to step {rewind['to']} because of the spike at step {rewind['spike']}: steps "
        f"{first}-{last} are dropped, the batches of steps {from_}-{to} are skipped"
    )


def rows_text(rows: list[dict[str, Any]]) -> str:
    """Return the worst rows of a step: number, corpus and offset."""
    shown = [f"{r['row']} ({r['corpus']} @{r['offset']})" for r in rows[:SHOWN_ROWS]]
    return ", ".join(shown) + (", ..." if len(rows) > SHOWN_ROWS else "")


def skipped_ranges(records: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """Return first and last steps of the stretches that were skipped."""
    steps = sorted(r["step"] for r in records if r["kind"] == "train" and r["skipped"])
    groups = itertools.groupby(enumerate(steps), lambda pair: pair[1] - pair[0])
    stretches = [[step for _, step in group] for _, group in groups]
    return [(stretch[0], stretch[-1]) for stretch in stretches]


def spikes_table(records: list[dict[str, Any]]) -> str:
    """Return spikes, skips and rewinds of a run, in the order of their steps."""
    from rich.console import Console
    from rich.table import Table

    rows = sorted(_rows(records), key=lambda row: row[0])
    if not rows:
        return "no spikes, skips or rewinds"
    table = Table(title="Spikes, skips and rewinds")
    for heading in ("step", "event", "loss", "limit", "grad norm"):
        table.add_column(heading, justify="right")
    for heading in ("what was done", "worst rows"):
        table.add_column(heading, overflow="fold")
    for step, *cells in rows:
        table.add_row(str(step), *cells)
    console = Console(width=160)
    with console.capture() as captured:
        console.print(table)
    return captured.get().rstrip()


def _rows(records: list[dict[str, Any]]) -> Iterator[tuple[Any, ...]]:
    for r in records:
        if r["kind"] == "spike":
            yield r["step"], f"spike: {r['cause']}", *_numbers(r), r["action"], rows_text(r["rows"])
        elif r["kind"] == "rewind":
            done = (
                f"rewound to step {r['step']}, dropped {_range(r['dropped'])}, "
                f"skipped {_range(r['skip'])}"
            )
            yield r["spike"], f"spike: {r['cause']}", *_numbers(r), done, rows_text(r["rows"])
    for first, last in skipped_ranges(records):
        yield first, "skip", "", "", "", f"{_range((first, last))} skipped", ""


def _numbers(record: dict[str, Any]) -> tuple[str, ...]:
    values = (record["loss"], record.get("limit"), record["grad_norm"])
    return tuple("-" if value is None else f"{value:.4g}" for value in values)


def _range(ends: tuple[int, int] | list[int]) -> str:
    return f"{ends[0]}-{ends[1]}" if ends[0] != ends[1] else str(ends[0])


def draw_spikes(records: list[dict[str, Any]], title: str, path: Path) -> None:
    """Draw a PNG of the loss curve with spikes, skips and rewinds.

    Raises:
        UsageError: if matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError(
            f"--png={path}: needs matplotlib; pip install 'jaxgpt[report]' brings it"
        ) from None
    train = [r for r in records if r["kind"] == "train"]
    figure = Figure(figsize=(10, 5), layout="constrained")
    axes = figure.add_subplot()
    steps, losses = [r["step"] for r in train], [r["loss"] for r in train]
    axes.plot(steps, _with_gaps(losses), color="C0", linewidth=1, label="loss")
    evaluated = [(r["step"], r["val_loss"]) for r in records if r["kind"] == "eval"]
    if evaluated:
        axes.plot(*zip(*evaluated, strict=True), "o-", color="C1", markersize=3, label="val loss")
    for number, (first, last) in enumerate(skipped_ranges(records)):
        label = None if number else "skipped"
        axes.axvspan(first - 0.5, last + 0.5, color="0.85", zorder=0, label=label)
    _draw_rewinds(axes, [r for r in records if r["kind"] == "rewind"])
    for cause, marker in (("loss", "v"), ("grad_norm", "d"), ("nonfinite", "x")):
        found = [r for r in records if r["kind"] == "spike" and r["cause"] == cause]
        if found:
            heights = [r["loss"] if r["loss"] is not None else axes.get_ylim()[0] for r in found]
            axes.scatter(
                [r["step"] for r in found], heights, marker=marker, color="C3", zorder=3,
                label=f"spike: {cause}",
            )  # fmt: skip
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=title)
    axes.legend()
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"--png={path}: cannot be written ({error}); name a .png in a folder that can"
        ) from None


def _draw_rewinds(axes: Any, rewinds: list[dict[str, Any]]) -> None:
    """Draw what was dropped, and an arrow from each spike to where the run went back to."""
    for number, r in enumerate(rewinds):
        dropped = sorted(dict([*r["dropped_losses"], [r["spike"], r["loss"]]]).items())
        steps, losses = zip(*dropped, strict=True)
        labels = (None, None) if number else ("dropped", "rewind")
        axes.plot(steps, _with_gaps(losses), ":", color="C3", linewidth=1, label=labels[0])
        axes.plot(r["spike"], r["loss"], "v", color="C3", label=labels[1])
        axes.annotate(
            "",
            xy=(r["step"], r["loss"]),
            xytext=(r["spike"], r["loss"]),
            arrowprops={"arrowstyle": "->", "color": "C3"},
        )
        axes.axvline(r["step"], color="C3", linewidth=0.5, linestyle="--")


def _with_gaps(losses: Any) -> list[float]:
    return [float("nan") if loss is None else loss for loss in losses]
