"""Print tables about runs: start-up time, goodput, and spikes with their rewinds."""

import datetime
import shutil
import sys
from pathlib import Path
from typing import Any

from rich.table import Column

from jaxgpt.cluster.environment import rank_from_env
from jaxgpt.cluster.shutdown import job_exit_handler
from jaxgpt.config import CommandParser, UsageError, file_path, in_words, read_json
from jaxgpt.spikes.report import draw_spikes, spikes_table
from jaxgpt.tracking.console import table_text
from jaxgpt.tracking.jsonl import METRICS, read_records
from jaxgpt.tracking.records import StragglerRecord
from jaxgpt.train.reporting.goodput import goodput_table, read_goodput
from jaxgpt.train.reporting.stragglers import straggler_line

HEADINGS = (
    "run", "model", "processes", "start", "first step done", "seconds", "from", "slowest phase",
    "compile cache",
)  # fmt: skip
SPREAD = {"max": float, "slowest_rank": int}
SHAPE = {  # of startup.json
    "model": str, "processes": int, "first_step_done": float, "compile_cache": str,
    "job_start_to_first_step": float | None, "total": SPREAD, "phases": {str: SPREAD},
    "slowest_phase": str,
}  # fmt: skip
LOG_WIDTH = 200  # table width if the output is not a terminal, so that long rows are not wrapped


def parser() -> CommandParser:
    out = CommandParser(prog="python -m jaxgpt.report", description=__doc__)
    kinds = out.add_subparsers(dest="kind", required=True, metavar="{startup,goodput,spikes}")
    startup = kinds.add_parser("startup", help="time from the start of a job to the first step")
    startup.add_argument("runs", nargs="+", type=file_path, metavar="RUN", help="a run directory")
    goodput = kinds.add_parser("goodput", help="how a run spent its time, over all its starts")
    goodput.add_argument("run", type=file_path, metavar="RUN", help="a run directory")
    spikes = kinds.add_parser("spikes", help="spikes, skips and rewinds of a run")
    spikes.add_argument("run", type=file_path, metavar="RUN", help="a run directory")
    spikes.add_argument("--png", type=file_path, metavar="FILE", help="also plot the loss curve")
    return out


def main(argv: list[str] | None = None) -> None:
    with job_exit_handler():
        if rank_from_env() != 0:  # under a launcher, only process 0 prints
            return
        arguments = parser().parse_args(argv)
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else LOG_WIDTH
        if arguments.kind == "startup":
            rows = [read_startup(run) for run in arguments.runs]
            headings = [Column(heading, overflow="fold") for heading in HEADINGS]
            print(table_text(headings, rows, width, title="Start-up"))
        elif arguments.kind == "goodput":
            print(goodput_report(arguments.run, width))
        else:
            spikes_report(arguments.run, arguments.png)


def spikes_report(run: Path, png: Path | None) -> None:
    """Print a table of a run's spikes; if `png` is given, also plot the loss curve to that file.

    Raises `UsageError` if metrics.jsonl cannot be read, if the plot cannot be written, or if
    matplotlib is missing.
    """
    records, path = read_metrics(run), run / METRICS
    lost = len(path.read_bytes().splitlines()) - len(records)
    if png is not None:  # plot first, because this can fail
        draw_spikes(records, str(run), png)
    print(spikes_table(records))
    if lost:
        print(f"warning: {lost} lines of {path} are damaged and were ignored")
    if png is not None:
        print(f"loss curve: {png}")


def read_metrics(run: Path, kind: str = "") -> list[dict[str, Any]]:
    """Return the records of a run, or only the records of one kind.

    Raises `UsageError` if its metrics.jsonl cannot be read.
    """
    path = run / METRICS
    try:
        return read_records(path, kind)
    except OSError as error:
        raise UsageError(
            f"RUN={run}: {path} cannot be read ({error.strerror}); give a run directory"
        ) from None


def goodput_report(run: Path, width: int) -> str:
    """Return a table of a run's goodput, followed by a line for each straggler record.

    The table is at most `width` columns wide. Raises `UsageError` if metrics.jsonl cannot be read
    or has no goodput records.
    """
    stragglers, records = read_metrics(run, StragglerRecord.kind), read_goodput(run)
    if not records:
        raise UsageError(
            f"RUN={run}: its metrics.jsonl has no goodput records; give a run that has trained a "
            "step"
        )
    return "\n".join([goodput_table(records, width), *map(straggler_line, stragglers)])


def read_startup(run: Path) -> list[str]:
    """Return a run's row in the table of start-up times, in the order of `HEADINGS`.

    Raises `UsageError` if its startup.json cannot be read or is malformed.
    """
    path = run / "startup.json"
    try:
        return startup_row(run, read_json(path, SHAPE))
    except (OSError, ValueError, KeyError, OverflowError) as error:
        raise UsageError(
            f"RUN={run}: {path} cannot be read ({in_words(error)}); give the directory of a run "
            "that has completed its first step"
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
