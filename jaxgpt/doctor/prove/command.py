"""Measure a machine and write a table of results and goals: `python -m jaxgpt.doctor prove`."""

import json
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jaxgpt import __version__
from jaxgpt.cluster import shutdown
from jaxgpt.cluster.environment import check_no_launcher
from jaxgpt.config import CommandParser, UsageError, file_path, whole_number
from jaxgpt.doctor.prove.checks import CHECKS, ab_check
from jaxgpt.doctor.prove.measure import Commands, Missing, Row
from jaxgpt.tracking.jsonl import atomic_write_text

OUT = Path("runs/prove")
MIN_SECONDS = 15  # a check starts only if more time than this is left

Results = dict[str, dict[str, Any]]
"""The status, reason, seconds and rows of each check that has run, by check name."""


def parser() -> CommandParser:
    out = CommandParser(
        prog="python -m jaxgpt.doctor prove",
        description="Measure the speed, numerics, resuming and memory of a machine, especially one "
        "with a GPU. A second call with the same --out runs the unfinished checks, and any checks "
        "named on the command line.",
        epilog="The exit status is 0 if all goals are met, 1 if a check failed or missed a goal, 2 "
        "if an argument is wrong, and 75 if the time ran out. Checks whose data or tools are "
        "missing are not counted.",
    )
    names = ", ".join(dict.fromkeys(map(_short, CHECKS)))
    about = f"checks to run, most useful first; default {names}"
    out.add_argument("only", nargs="*", metavar="CHECK", help=about)
    out.add_argument(
        "--ab",
        nargs="+",
        metavar="CHANGE",
        help="time a gpt2 step with each change, such as xla_gpu_autotune_level=0 or "
        "'parallel.remat=dots model.attention=xla', and run no other checks by default",
    )
    out.add_argument(
        "--minutes", type=whole_number(), default=25, help="time limit in minutes; default 25"
    )
    out.add_argument(
        "--out",
        type=file_path,
        default=OUT,
        metavar="DIR",
        help=f"folder for results; default {OUT}",
    )
    out.add_argument("--nanogpt", type=file_path, metavar="DIR", help="path of a clone of nanoGPT")
    out.add_argument(
        "--torch", metavar="PYTHON", default=sys.executable, help="Python with PyTorch"
    )
    out.add_argument("--text", type=file_path, metavar="FILE", help="the text of Tiny Shakespeare")
    return out


def main(argv: Sequence[str]) -> NoReturn:
    with shutdown.job_exit_handler():
        given = parser().parse_args(argv)
        check_no_launcher("run prove without one; it uses a single process")
        names = dict.fromkeys(map(_short, CHECKS))
        if unknown := [name for name in given.only if name not in names]:
            raise UsageError(f"{unknown[0]}: is not a check; choose from {', '.join(names)}")
        only = [name for name in CHECKS if _short(name) in (given.only or names)]
        named = [name for name in only if given.only]
        checks = CHECKS
        if given.ab:
            own = ab_check(given.ab)
            checks, named, only = checks | own, [*own, *named], [*own, *named]
        # The exception makes `Commands` kill the command of the current check.
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        results = read_results(given.out)
        deadline = time.monotonic() + 60 * given.minutes
        for name in only:
            function, limit = checks[name]
            limit = min(limit, deadline - time.monotonic())
            is_done = results.get(name, {}).get("status") == "done"
            if (not is_done or name in named) and limit > MIN_SECONDS:
                print(f"{name}: at most {limit:.0f} s", file=sys.stderr, flush=True)
                # A comparison's name may contain any character or be too long to be a file name.
                folder = given.out / re.sub(r"[^\w.=-]+", "-", name, flags=re.ASCII)[:200]
                commands = Commands(folder, limit, given.nanogpt, given.torch, given.text)
                results[name] = run_check(function, commands)
                _write_results(given.out, results)
        print(markdown(results))
    sys.exit(_exit_status([results.get(name, {"status": "not run", "rows": []}) for name in only]))


def _short(name: str) -> str:
    """Return the name that selects a check: `ab` selects all comparisons."""
    return name.partition(":")[0]


def run_check(function: Callable[..., Any], commands: Commands) -> dict[str, Any]:
    """Empty the check's folder, run the check, and return a dict for `Results`.

    The keys are status, reason, seconds and rows. Each row has the fields of `Row`. The status is
    done, missing (data or tools), cut off (by the time limit) or failed. The reason is empty if the
    status is done. Errors raised by the check are not propagated. If the check failed, its
    traceback is printed to stderr.
    """
    began, rows = time.monotonic(), []
    status, reason = "done", ""
    try:
        shutil.rmtree(commands.folder, ignore_errors=True)  # left by an earlier attempt
        commands.folder.mkdir()
        for row in function(commands):
            rows.append(row._asdict())
    except Missing as error:
        status, reason = "missing", str(error)
    except subprocess.TimeoutExpired:
        status, reason = "cut off", "it reached its time limit"
    except Exception as error:  # one broken check must not stop the others
        traceback.print_exc()
        first_line = str(error).partition("\n")[0]
        status, reason = "failed", f"{type(error).__name__}: {first_line}"
    seconds = time.monotonic() - began
    return {"status": status, "reason": reason, "seconds": seconds, "rows": rows}


def read_results(out: Path) -> Results:
    """Return the earlier results in `out`/prove.json, or an empty dict.

    Creates the folder `out` if necessary. Raises `UsageError` if the folder cannot be created, or
    if prove.json is unreadable or malformed. The types of the values are not checked.
    """
    path = out / "prove.json"
    try:
        out.mkdir(parents=True, exist_ok=True)
        results = json.loads(path.read_text())["checks"] if path.exists() else {}
        for result in results.values():
            _ = result["status"], result["reason"], [Row(**row) for row in result["rows"]]
        return results
    except OSError as error:
        raise UsageError(
            f"--out={out}: cannot be written to ({error.strerror or error}); give a writable folder"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UsageError(f"{path}: does not contain results of prove; give another --out") from None


def _write_results(out: Path, results: Results) -> None:
    machine = f"jaxgpt {__version__} on {platform.node()}"
    values = {"machine": machine, "checks": results}
    atomic_write_text(out / "prove.json", json.dumps(values, indent=1))
    atomic_write_text(out / "prove.md", f"{machine}\n\n{markdown(results)}")


def markdown(results: Results) -> str:
    """Return a Markdown table of all rows, with an extra line for each check that is not done."""
    met = {None: "", True: "yes", False: "**no**"}
    lines = [["check", "what", "value", "goal", "met"], ["---"] * 5]
    for name, result in results.items():
        for row in (Row(**row) for row in result["rows"]):
            note = f" ({row.note})" if row.note else ""
            lines.append([name, row.name, row.shown + note, row.goal, met[row.met]])
        if result["status"] != "done":
            lines.append([name, f"**{result['status']}**", result["reason"], "", ""])
    cells = [[cell.replace("|", "/").replace("\n", " ") for cell in line] for line in lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def _exit_status(results: Sequence[dict[str, Any]]) -> int:
    if any(r["status"] == "failed" or any(w["met"] is False for w in r["rows"]) for r in results):
        return shutdown.FAILED
    if any(r["status"] not in ("done", "missing") for r in results):
        return shutdown.STOPPED
    return shutdown.DONE
