"""Report files in PNG and CSV format."""

import contextlib
import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxgpt.config import UsageError, in_words
from jaxgpt.report.panels import COLORS, MARKS, PANELS, Panel, series_of
from jaxgpt.tracking.run_files import RunFiles

STYLES: dict[str, dict[str, Any]] = {
    "raw": {"alpha": 0.3, "linewidth": 0.8}, "smooth": {}, "line": {},
    "points": {"marker": "o", "markersize": 3}, "dropped": {"linestyle": ":"},
}  # fmt: skip


@contextlib.contextmanager
def writing(option: str, path: Path) -> Iterator[None]:
    """Raise `UsageError` in place of errors that occur while a file is being written.

    This applies to `OSError`, `ValueError` and `RuntimeError`. Matplotlib raises `RuntimeError` if,
    for example, LaTeX is missing. The message names `option`, such as `--csv`.
    """
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"{option}={path}: cannot be written ({in_words(error)}); give another file in a "
            "writable folder"
        ) from None


@contextlib.contextmanager
def picture(path: Path, *size: float) -> Iterator[Any]:
    """Yield a matplotlib figure of `size` (width, height) inches, then write it to a file.

    The suffix of `path` selects the file format. Without a suffix, the format is PNG.
    Raises `UsageError` if the file cannot be written or matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        text = f"--png={path}: needs matplotlib; pip install 'jaxgpt[report]' installs it"
        raise UsageError(text) from None
    figure = Figure(figsize=size, layout="constrained")
    yield figure
    with writing("--png", path):
        figure.savefig(path, dpi=120, format=path.suffix[1:] or "png")


def draw_png(runs: Sequence[RunFiles], path: Path, panels: Sequence[Panel] = PANELS) -> None:
    """Plot each panel whose first curve has values in any run, and write the plots to a file.

    Raises `UsageError` if the file cannot be written or matplotlib is missing.
    """
    found = [(panel, [series_of(run, panel) for run in runs]) for panel in panels]
    found = [pair for pair in found if any(len(s[0].columns["y"]) for s in pair[1])]
    width, height = min(2, max(1, len(found))), max(1, -(-len(found) // 2))  # in panels
    with picture(path, 8 * width, 4 * height) as figure:
        for index, (panel, of_runs) in enumerate(found):
            axes = figure.add_subplot(height, width, index + 1)
            axes.set(title=panel.title, xlabel="step", ylabel=panel.unit)
            for i, (run, series) in enumerate(zip(runs, of_runs, strict=True)):
                for style, label, columns in series[:-1]:
                    name = f"{run.name}: {label}" if len(runs) > 1 else label
                    n = i if len(runs) > 1 else [c[2] for c in panel.curves].index(label)
                    look = {"color": COLORS[n % len(COLORS)], **STYLES[style]}
                    look["label"] = "" if style == "raw" or not len(columns["y"]) else name
                    if np.isfinite(columns["y"]).sum() == 1:  # a line would be invisible
                        look |= STYLES["points"]
                    axes.plot(columns["steps"], columns["y"], **look)
                bottom, names = axes.get_ylim()[0], ("kind", "steps", "steps_end", "y")
                for kind, x, end, y in zip(*map(series[-1].columns.get, names), strict=True):
                    color, _, marker, meaning = MARKS[kind]
                    if kind == "skip":
                        axes.axvspan(x - 0.5, end + 0.5, color="0.85", zorder=0)
                    else:
                        label = "" if meaning in axes.get_legend_handles_labels()[1] else meaning
                        axes.plot(x, bottom if np.isnan(y) else y, marker, c=color, label=label)
            axes.legend(fontsize="small")


def draw_startup(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Plot the start-up times (in seconds) from `start_rows`, and write the plot to a file.

    Starts with an unknown time are left out.
    Raises `UsageError` if the file cannot be written or matplotlib is missing.
    """
    points = [(r["processes"], r["seconds"]) for r in rows if r["seconds"] is not None]
    with picture(path, 7, 5) as figure:
        axes = figure.add_subplot(xlabel="processes", ylabel="seconds to the end of the first step")
        axes.semilogx(*np.array(points or np.empty((0, 2))).T, "o", base=2, alpha=0.6)
        axes.xaxis.set_major_formatter("{x:.0f}")


def write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write dicts as the rows of a CSV file, with a column for each key.

    Raises `UsageError` if the file cannot be written.
    """
    with writing("--csv", path), path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
        writer.writeheader()
        writer.writerows(rows)
