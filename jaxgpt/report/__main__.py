"""Show runs: `python -m jaxgpt.report RUN...` writes one page about one or more runs."""

import json
import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxgpt.cluster.environment import rank_from_env
from jaxgpt.cluster.shutdown import job_exit_handler
from jaxgpt.config import CommandParser, UsageError, file_path, whole_number
from jaxgpt.report.draw import draw_png, draw_startup, write_csv, writing
from jaxgpt.report.panels import PANELS, series_of
from jaxgpt.spikes.report import spikes_table
from jaxgpt.tracking.console import table_text
from jaxgpt.tracking.jsonl import METRICS
from jaxgpt.tracking.run_files import RunFiles, read_runs
from jaxgpt.tracking.starts import start_rows
from jaxgpt.tracking.text_plot import plot_text
from jaxgpt.train.reporting.goodput import goodput_records, goodput_table
from jaxgpt.train.reporting.stragglers import straggler_line

PIPE_WIDTH = 200  # table width in characters if the output is not a terminal
TABLES = {"--csv": "write the rows to this CSV file", "--json": "write the rows to this JSON file"}
KINDS: dict[str, tuple[str, dict[str, str]]] = {  # description and file options
    "page": ("curves, events, samples and settings; the default", {
        "--out": "write the page to this file; default: report.html, unless --png, --csv or --text "
        "is given", "--png": "write the curves to this PNG file",
        "--csv": "write the metrics of all steps to this CSV file"}),
    "serve": ("a live version of the page, for this host only", {}),
    "runs": ("a row for each run: state, step, losses, speed, mesh and age", TABLES),
    "startup": ("a row for each start of each run", TABLES | {
        "--png": "write a plot of start-up time by number of processes to this PNG file"}),
    "goodput": ("how a run spent its time, over all its starts", {}),
    "spikes": ("spikes, skips and rewinds", {"--png": "write the loss curve to this PNG file"}),
}  # fmt: skip
LAYERS = {  # fields of `LayersRecord` that --text plots
    "grad_norm": "gradient norm",
    "weight_norm": "weight norm",
    "activation_rms": "RMS of the activations",
}


def parser() -> CommandParser:
    out = CommandParser(prog="python -m jaxgpt.report", description=__doc__)
    kinds = out.add_subparsers(dest="kind", required=True)
    for kind, (text, files) in KINDS.items():
        one = kinds.add_parser(kind, help=text, description=text)
        how = {"nargs": "*", "default": [Path("runs")]} if kind == "runs" else {"nargs": "+"}
        one.add_argument("runs", type=file_path, metavar="RUN", help="a run or a folder", **how)
        for option, about in files.items():
            names = ("-o", option) if option == "--out" else (option,)
            one.add_argument(*names, type=file_path, metavar="FILE", help=about)
        if kind == "page":
            one.add_argument("--text", action="store_true", help="plot in the terminal")
        if kind in ("startup", "runs"):
            one.add_argument("--sort", metavar="COLUMN", help="sort the rows by this column")
        if kind == "serve":
            one.add_argument("--port", type=whole_number(1, 16), default=5006, help="TCP port")
    return out


def main(argv: list[str] | None = None) -> None:
    with job_exit_handler():
        if rank_from_env() != 0:  # under a launcher, only process 0 prints
            return
        argv = sys.argv[1:] if argv is None else argv
        if not argv:
            raise UsageError(
                "RUN: is missing; give a run directory, or see --help for the other commands"
            )
        is_page = argv[0] not in (*KINDS, "-h", "--help")
        options = (word.partition("=")[0] for word in argv)
        of_page = [name for name in options if name in ("--text", "--png", "--out", "-o")]
        if argv[:1] == ["runs"] and of_page:
            raise UsageError(
                f"{of_page[0]}: not an option of the command runs, which lists runs; to "
                "plot the folder runs, use python -m jaxgpt.report ./runs"
            )
        given = parser().parse_args(["page", *argv] if is_page else argv)
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else PIPE_WIDTH
        if given.kind == "serve":
            from jaxgpt.report.serve import serve

            return serve(given.runs, given.port)
        runs = read_runs(given.runs)
        if given.kind == "page":
            page_report(runs, given, min(width, 100))
        elif given.kind in ("runs", "startup"):
            rows_report(runs, given, width)
        elif given.kind == "goodput":
            goodput_report(runs, width)
        else:
            spikes_report(runs, width, given.png)


def page_report(runs: list[RunFiles], given: Any, width: int) -> None:
    if given.text:
        print("\n\n".join(plots_text(run, width) for run in runs))
    if given.png:
        draw_png(runs, given.png)
    if given.csv:
        write_csv(given.csv, [row for run in runs for row in run.numbers()])
    if given.out or not (given.text or given.png or given.csv):
        from jaxgpt.report.page import page

        given.out = given.out or Path("report.html")
        text = page(runs, ", ".join(run.name for run in runs))
        with writing("--out", given.out):
            given.out.write_text(text)
    for path in filter(None, (given.out, given.png, given.csv)):
        print(f"wrote {path}")


def plots_text(run: RunFiles, width: int) -> str:
    """Return a text summary of a run, with plots that are `width` (at least 31) columns wide.

    A nearly constant curve is summarized by its range instead of a plot, unless the panel has a
    logarithmic axis. If the run has a `LayersRecord`, the newest one is plotted with the layers on
    the x-axis.
    """
    facts = [f"{key} {value}" for key, value in run.row().items() if value is not None]
    lines = textwrap.wrap(", ".join(facts), width, subsequent_indent="    ")
    for panel in PANELS:
        curves, _ = series_of(run, panel)
        for _, style, label, columns in curves:
            steps, values = columns["steps"], columns["y"]
            finite = values[np.isfinite(values)]
            if style in ("smooth", "dropped") or not len(finite):
                continue
            is_title = label.lower() == panel.title.lower()
            words = (panel.title, "" if is_title else label, panel.unit)
            lines += ["", ", ".join(filter(None, words))]
            low, high = finite.min(), finite.max()
            if panel.has_log or high - low > 0.1 * high:
                lines += plot_text(steps, values, width)
            else:
                lines[-1] += f": {low:.4g} to {high:.4g}"
    for record in run.records["layers"][-1:]:
        for key, title in LAYERS.items():
            values = np.array(list(record.get(key, {}).values()), float)
            if np.isfinite(values).any():
                lines += ["", f"Layers at step {record['step']}, {title}"]
                lines += plot_text(np.arange(len(values)), values, width, "layer")
    return "\n".join(lines)


def rows_report(runs: list[RunFiles], given: Any, width: int) -> None:
    """Print a table with a row for each run or each start, and write the requested files.

    Raises `UsageError` if there are rows and --sort names an unknown column.
    """
    rows: list[dict[str, Any]] = []
    for run in runs:
        if given.kind == "startup":
            rows += start_rows(run.name, run.directory, run.state())
        else:
            rows.append(run.row())
    if given.kind == "startup" and given.png:
        draw_startup(rows, given.png)
    if given.sort and rows:
        if given.sort not in rows[0]:
            raise UsageError(f"--sort={given.sort}: no such column; use {', '.join(rows[0])}")
        rows.sort(key=lambda row: (row[given.sort] is None, row[given.sort]))
    if given.csv:
        write_csv(given.csv, rows)
    if given.json:
        with writing("--json", given.json):
            given.json.write_text(json.dumps(rows, indent=1, default=str) + "\n")
    print(tables_text(rows, width, keys=2 if given.kind == "startup" else 1))


def tables_text(rows: list[dict[str, Any]], width: int, keys: int) -> str:
    """Return the rows as a table, or as several tables if one would exceed `width` characters.

    The first `keys` columns are repeated in each table. All rows must have the same keys in the
    same order. None is shown as `-`. If there are no rows, return `no starts`.
    """
    if not rows:
        return "no starts"
    cells = [["-" if value is None else str(value) for value in row.values()] for row in rows]
    columns = list(zip(rows[0], *cells, strict=True))
    parts = [columns[:keys]]
    for column in columns[keys:]:
        wider = [*parts[-1], column]
        if len(parts[-1]) > keys and sum(max(map(len, c)) + 3 for c in wider) + 1 > width:
            parts.append([*columns[:keys], column])
        else:
            parts[-1] = wider
    tables = (zip(*part, strict=True) for part in parts)
    return "\n".join(table_text(next(table), table, width) for table in tables)


def goodput_report(runs: Sequence[RunFiles], width: int) -> None:
    """Print the goodput and stragglers of each run.

    Goodput is shown as a table at most `width` columns wide. Raises `UsageError` if no run has
    goodput records.
    """
    found = [goodput_records(run.records["goodput"]) for run in runs]
    if not any(found):
        text = f"RUN={runs[0].directory}: its metrics.jsonl has no goodput records"
        raise UsageError(f"{text}; give a run that has trained a step")
    for run, goodput in zip(runs, found, strict=True):
        _print_name(run, runs)
        print(goodput_table(goodput, width) if goodput else "no goodput records")
        for line in map(straggler_line, run.records["straggler"]):
            print(line)


def spikes_report(runs: Sequence[RunFiles], width: int, png: Path | None) -> None:
    """Print the spikes, skips and rewinds of each run, and plot the loss curves.

    The lines of the tables have at most `width` characters. The plot is written to the file `png`.
    If `png` is None, nothing is plotted.
    """
    if png is not None:
        draw_png(runs, png, PANELS[:1])
    for run in runs:
        _print_name(run, runs)
        print(spikes_table(sum(run.records.values(), []), width))
        if run.n_damaged:
            path = run.directory / METRICS
            print(f"warning: {run.n_damaged} lines of {path} are damaged and were ignored")
    if png is not None:
        print(f"loss curve: {png}")


def _print_name(run: RunFiles, runs: Sequence[RunFiles]) -> None:
    if len(runs) > 1:
        print(f"{run.name}:")


if __name__ == "__main__":
    main()
