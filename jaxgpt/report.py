"""Tables about runs: `python -m jaxgpt.report startup RUN...` and `spikes RUN [--png FILE]`.

`startup` compares how long runs took from the start of their job to the end of their first step.
`spikes` lists the spikes of a run, what was skipped and where it went back to, and draws them.
"""

import datetime
import json
from pathlib import Path
from typing import Any

from jaxgpt.cluster.environment import rank_from_env
from jaxgpt.cluster.shutdown import job_exit_handler
from jaxgpt.config import CommandParser, UsageError, file_path
from jaxgpt.spikes.report import draw_spikes, spikes_table
from jaxgpt.tracking.jsonl import read_records


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
            startup_table([(run, read_startup(run)) for run in arguments.runs])
        else:
            spikes_report(arguments.run, arguments.png)


def spikes_report(run: Path, png: Path | None) -> None:
    """Print the table of a run's spikes, and draw its losses."""
    try:
        records = read_records(run / "metrics.jsonl")
    except OSError as error:
        raise UsageError(
            f"RUN={run}: {run}/metrics.jsonl cannot be read ({error.strerror}); give a run "
            "directory"
        ) from None
    if png is not None:  # first: it is what can fail
        draw_spikes(records, str(run), png)
    print(spikes_table(records))
    if png is not None:
        print(f"loss curve: {png}")


def read_startup(run: Path) -> dict[str, Any]:
    """Return the startup.json of a run directory; raise `UsageError` if it cannot be read."""
    path = run / "startup.json"
    try:
        found = json.loads(path.read_text())
        startup_row(run, found)
        return found
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(
            f"RUN={run}: has no startup.json; give a run directory whose first step is done"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"RUN={run}: {path} cannot be read ({error}); the run's next start writes it anew"
        ) from None


def startup_table(runs: list[tuple[Path, dict[str, Any]]]) -> None:
    """Print a row for each run."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(title="Start-up")
    headings = "run model processes start first_step_done seconds from slowest_phase compile_cache"
    for heading in headings.split():
        justify = "right" if heading == "seconds" else "left"
        table.add_column(heading.replace("_", " "), justify=justify, overflow="fold")
    for run, found in runs:
        table.add_row(*startup_row(run, found))
    if not console.is_terminal:
        console.width = 200  # rows of a log file are not folded
    console.print(table)


def startup_row(run: Path, found: dict[str, Any]) -> list[str]:
    seconds, origin = found["job_start_to_first_step"], "job start"
    if seconds is None:
        seconds, origin = found["total"]["max"], "process start"
    slowest = found["slowest_phase"]
    most = found["phases"][slowest]
    return [
        str(run),
        f"{found['model']}",
        f"{found['processes']}",
        clock(found["first_step_done"] - seconds),
        clock(found["first_step_done"]),
        f"{seconds:.1f}",
        origin,
        f"{slowest}, {most['max']:.1f} s on rank {most['slowest_rank']}",
        f"{found['compile_cache']}",
    ]


def clock(unix_time: float) -> str:
    return datetime.datetime.fromtimestamp(unix_time).strftime("%Y-%m-%d %H:%M:%S")


if __name__ == "__main__":
    main()
