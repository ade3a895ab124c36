"""Tables about runs: how long they took to their first step, and their spikes and rewinds."""

import datetime
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from rich.table import Column

from jaxgpt.cluster.environment import rank_from_env
from jaxgpt.cluster.shutdown import job_exit_handler
from jaxgpt.config import CommandParser, UsageError, file_path
from jaxgpt.spikes.report import draw_spikes, spikes_table
from jaxgpt.tracking.console import table_text
from jaxgpt.tracking.jsonl import read_records

HEADINGS = (
    "run", "model", "processes", "start", "first step done", "seconds", "from", "slowest phase",
    "compile cache",
)  # fmt: skip
LOG_WIDTH = 200  # columns: rows of a log file are not folded


def parser() -> CommandParser:
    out = CommandParser(prog="python -m jaxgpt.report", description=__doc__)
    kinds = out.add_subparsers(dest="kind", required=True, metavar="{startup,spikes}")
    startup = kinds.add_parser("startup", help="from the start of the job to the first step")
    startup.add_argument("runs", nargs="+", type=file_path, metavar="RUN", help="a run directory")
    spikes = kinds.add_parser("spikes", help="spikes, skips and rewinds of a run")
    spikes.add_argument("run", type=file_path, metavar="RUN", help="a run directory")
    spikes.add_argument("--png", type=file_path, metavar="FILE", help="also draw the loss curve")
    return out


def main(argv: list[str] | None = None) -> None:
    with job_exit_handler():
        if rank_from_env() != 0:  # under a launcher once is enough
            return
        arguments = parser().parse_args(argv)
        if arguments.kind == "startup":
            rows = [read_startup(run) for run in arguments.runs]
            width = shutil.get_terminal_size().columns if sys.stdout.isatty() else LOG_WIDTH
            headings = [Column(heading, overflow="fold") for heading in HEADINGS]
            print(table_text(headings, rows, width, title="Start-up"))
        else:
            spikes_report(arguments.run, arguments.png)


def spikes_report(run: Path, png: Path | None) -> None:
    """Print the table of a run's spikes, and draw its losses."""
    path = run / "metrics.jsonl"
    try:
        records = read_records(path)
    except OSError as error:
        raise UsageError(
            f"RUN={run}: {path} cannot be read ({error.strerror}); give a run directory"
        ) from None
    if png is not None:  # first: it is what can fail
        draw_spikes(records, str(run), png)
    print(spikes_table(records))
    if png is not None:
        print(f"loss curve: {png}")


def read_startup(run: Path) -> list[str]:
    """Return the row of a run directory; raise `UsageError` if its startup.json cannot be read."""
    path = run / "startup.json"
    try:
        return startup_row(run, json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"RUN={run}: {path} cannot be read ({error}); give a run directory whose first step is "
            "done"
        ) from None


def startup_row(run: Path, found: dict[str, Any]) -> list[str]:
    seconds, origin = found["job_start_to_first_step"], "job start"
    if seconds is None:
        seconds, origin = found["total"]["max"], "process start"
    most = found["phases"][found["slowest_phase"]]
    return [
        str(run),
        str(found["model"]),
        str(found["processes"]),
        clock(found["first_step_done"] - seconds),
        clock(found["first_step_done"]),
        f"{seconds:.1f}",
        origin,
        f"{found['slowest_phase']}, {most['max']:.1f} s on rank {most['slowest_rank']}",
        str(found["compile_cache"]),
    ]


def clock(unix_time: float) -> str:
    return datetime.datetime.fromtimestamp(unix_time).strftime("%Y-%m-%d %H:%M:%S")


if __name__ == "__main__":
    main()
