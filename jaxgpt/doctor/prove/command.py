"""`python -m jaxgpt.doctor prove`: measure a machine, and write a table of results and goals."""

import signal
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from jaxgpt.cluster import shutdown
from jaxgpt.config import CommandParser, UsageError, file_path, whole_number
from jaxgpt.doctor.prove import machine, memory, numerics, runs, speed
from jaxgpt.doctor.prove.check import Check
from jaxgpt.doctor.prove.results import Result, read_results, write_results

CHECKS = {  # name -> (function, time limit in seconds)
    "facts": (machine.facts, 60),
    "speed-gpt2": (speed.gpt2, 180),
    "nanogpt": (speed.nanogpt, 300),
    "speed-gpt2-xl": (speed.gpt2_xl, 240),
    "numerics": (numerics.numerics, 180),
    "resume": (runs.resume, 240),
    "memory": (memory.memory, 300),
    "spikes": (runs.spikes, 120),
    "profile": (speed.profile, 150),
    "shakespeare": (speed.shakespeare, 300),
    "tests": (numerics.tests, 300),
}
OUT = Path("runs/prove")
LEAST_SECONDS = 5  # no check begins with less time than this


def parser() -> CommandParser:
    out = CommandParser(
        prog="python -m jaxgpt.doctor prove",
        description="Measure a machine, above all one with a GPU: speed, numerics, resumption, "
        "memory, spikes. Called again with the same --out, it runs only the checks that are not "
        "done.",
        epilog="Exit status: 0 all checks ran and all goals are met; 1 a check failed or a goal is "
        "missed; 75 the time ran out before all checks had run.",
    )
    out.add_argument("only", nargs="*", metavar="CHECK", help=f"of {', '.join(CHECKS)}")
    out.add_argument("--minutes", type=whole_number(), default=25, help="default 25")
    out.add_argument("--out", type=file_path, default=OUT, metavar="DIR", help=f"default {OUT}")
    out.add_argument("--nanogpt", type=file_path, metavar="DIR", help="a clone of nanoGPT")
    out.add_argument("--torch", metavar="PYTHON", default=sys.executable, help="Python with torch")
    out.add_argument("--text", type=file_path, metavar="FILE", help="Tiny Shakespeare, for losses")
    return out


def main(argv: Sequence[str]) -> NoReturn:
    with shutdown.job_exit_handler():
        given = parser().parse_args(argv)
        unknown = [name for name in given.only if name not in CHECKS]
        if unknown:
            raise UsageError(f"{unknown[0]}: is no check; give some of {', '.join(CHECKS)}")
        # An exception ends the command of a check, which has a process group of its own.
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        status = prove(given, given.only or list(CHECKS))
    sys.exit(status)


def prove(options: Namespace, only: Sequence[str]) -> int:
    """Run the checks that are not done, print the table, and return an exit status."""
    deadline = time.monotonic() + 60 * options.minutes
    results = read_results(options.out, list(CHECKS))
    for name in (name for name in CHECKS if name in only):
        function, limit = CHECKS[name]
        limit = min(limit, deadline - time.monotonic())
        if results[name].status == "done" or limit < LEAST_SECONDS:
            continue
        print(f"{name}: at most {limit:.0f} s", file=sys.stderr, flush=True)
        results[name] = Result(name)
        check = Check(results[name], options, limit, lambda: write_results(options.out, results))
        check.execute(function)
    print((options.out / "prove.md").read_text())
    return exit_status([results[name] for name in only])


def exit_status(results: Sequence[Result]) -> int:
    if any(r.status == "failed" or any(row.met is False for row in r.rows) for r in results):
        return shutdown.FAILED
    if any(r.status not in ("done", "missing") for r in results):
        return shutdown.STOPPED
    return shutdown.DONE
