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
    "points": {"marker": "o", "markersize": 4}, "dropped": {"linestyle": ":"},
}  # fmt: skip
# Looks of the first, second and third curve of a panel. If there are several runs, the color shows
# the run, so the curves of a run differ only in these looks and in `STYLES`.
LINES: tuple[dict[str, Any], ...] = (
    {}, {"linestyle": "--"}, {"linestyle": "-.", "fillstyle": "none"},
)  # fmt: skip


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
        # "tight" fits the picture to its content, including a legend below the figure.
        figure.savefig(path, dpi=120, format=path.suffix[1:] or "png", bbox_inches="tight")


def draw_png(runs: Sequence[RunFiles], path: Path, panels: Sequence[Panel] = PANELS) -> None:
    """Plot each panel whose first curve has values in any run, and write the plots to a file.

    The legends are outside the panels: the curves above each panel, and the runs (if there are
    several) and the marks below all panels.
    """
    found = [(panel, [series_of(run, panel) for run in runs]) for panel in panels]
    found = [pair for pair in found if any(len(curves[0].columns["y"]) for curves, _ in pair[1])]
    width, height = min(2, max(1, len(found))), max(1, -(-len(found) // 2))  # in panels
    several = len(runs) > 1
    colors: Any = COLORS
    # The handles of the legend below the panels: one for each run and one for each kind of mark.
    names, marks = dict[str, Any](), dict[str, Any]()
    with picture(path, 8 * width, 4 * height) as figure:
        if len(runs) > len(COLORS):  # `COLORS` would give two runs the same color
            from matplotlib import colormaps

            colors = colormaps["turbo"](np.linspace(0.05, 0.95, len(runs)))
        for index, (panel, of_runs) in enumerate(found):
            axes, labels = figure.add_subplot(height, width, index + 1), dict[str, Any]()
            axes.set_title(panel.title, loc="left")
            axes.set(xlabel="step", ylabel=panel.unit)
            for i, (run, (curves, events)) in enumerate(zip(runs, of_runs, strict=True)):
                for n, style, label, columns in curves:
                    look = {"color": colors[i if several else n % len(COLORS)]}
                    look |= LINES[n % len(LINES)] | STYLES[style]
                    if np.isfinite(columns["y"]).sum() == 1:  # a line would be invisible
                        look |= STYLES["points"]
                    (line,) = axes.plot(columns["steps"], columns["y"], **look)
                    if style != "raw" and len(columns["y"]):
                        labels[label] = line
                        names.setdefault(run.name, line)
                bottom, fields = axes.get_ylim()[0], ("kind", "steps", "steps_end", "y")
                for kind, x, end, y in zip(*map(events.get, fields), strict=True):
                    color, _, marker, meaning = MARKS[kind]
                    if kind == "skip":
                        mark = axes.axvspan(x - 0.5, end + 0.5, color="0.85", zorder=0)
                    else:
                        (mark,) = axes.plot(x, bottom if np.isnan(y) else y, marker, c=color)
                    marks[meaning] = mark
            legend = axes.legend(
                labels.values(), labels, ncols=4, loc="lower right", bbox_to_anchor=(1, 1),
                fontsize="small", frameon=False, borderaxespad=0,
            )  # fmt: skip
            for line in legend.get_lines() if several else ():
                line.set_color("0.3")  # the style counts, not the run
        if shown := (names if several else {}) | marks:
            columns_that_fit = 120 * width // (max(map(len, shown)) + 9)
            figure.legend(
                shown.values(), shown, ncols=max(1, columns_that_fit), fontsize="small",
                loc="upper center", bbox_to_anchor=(0.5, 0),
            )  # fmt: skip


def draw_startup(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Plot the start-up times (in seconds) from `start_rows`, and write the plot to a file.

    Starts with an unknown time are left out.
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
