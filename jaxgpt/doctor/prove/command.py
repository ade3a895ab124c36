"""`python -m jaxgpt.doctor prove`: run all stages in turn, each in a process of its own."""

import argparse
import contextlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple, NoReturn

from jaxgpt import __version__
from jaxgpt.cluster import shutdown
from jaxgpt.cluster.hardware import accelerator_expected, lock_file
from jaxgpt.config import CommandParser, UsageError, file_path
from jaxgpt.doctor.facts import package_versions
from jaxgpt.doctor.prove import facts, memory, numerics, programs, runs, speed
from jaxgpt.doctor.prove.results import StageResult, markdown, read_result
from jaxgpt.doctor.prove.stage import Request, Stage, run_stage
from jaxgpt.tracking.jsonl import atomic_write_text


class Spec(NamedTuple):
    """What a stage runs, and the seconds that it gets at most."""

    run: Callable[[Stage], None]
    seconds: float


STAGES = {
    "facts": Spec(facts.facts, 60),
    "speed-gpt2": Spec(speed.gpt2, 180),
    "nanogpt": Spec(speed.nanogpt, 300),
    "speed-gpt2-xl": Spec(speed.gpt2_xl, 240),
    "numerics": Spec(numerics.numerics, 180),
    "resume": Spec(runs.resume, 240),
    "memory": Spec(memory.memory, 300),
    "spikes": Spec(runs.spikes, 120),
    "profile": Spec(programs.profile, 150),
    "sweep": Spec(programs.sweep, 900),
    "shakespeare": Spec(speed.shakespeare, 300),
    "tests": Spec(programs.tests, 300),
}

OUT = Path("runs/prove")
MINUTES = 25.0
MARGIN = 3.0  # seconds to end a stage and write the table
LEAST = 5.0  # seconds; with less no stage is begun


def parser() -> CommandParser:
    out = CommandParser(
        prog="python -m jaxgpt.doctor prove",
        description="Prove a machine, above all one with a GPU: speed, numerics, resumption, "
        "memory, spikes. Called again with the same --out it runs the stages that are missing.",
        epilog="Exit status: 0 all stages ran and all goals are met; 1 a stage failed or a goal is "
        "missed; 75 the time ran out before all stages ran.",
    )
    out.add_argument("only", nargs="*", metavar="STAGE", help=f"of {', '.join(STAGES)}")
    out.add_argument("--minutes", type=minutes, default=MINUTES, help=f"default {MINUTES:.0f}")
    out.add_argument("--out", type=file_path, default=OUT, metavar="DIR", help=f"default {OUT}")
    out.add_argument("--nanogpt", type=file_path, metavar="DIR", help="a clone of nanoGPT")
    out.add_argument("--torch", metavar="PYTHON", help="a Python with torch; default: this one")
    out.add_argument("--text", type=file_path, metavar="FILE", help="Tiny Shakespeare, for losses")
    out.add_argument("--stage-seconds", type=float, help=argparse.SUPPRESS)
    return out


def minutes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.5 <= value <= 24 * 60:
        raise argparse.ArgumentTypeError(f"{text} must be minutes, from 0.5 to 1440")
    return value


def main(argv: Sequence[str]) -> NoReturn:
    """Run the command, or with --stage-seconds one stage of it in this process."""
    with shutdown.job_exit_handler():
        arguments = parser().parse_args(argv)
        unknown = [name for name in arguments.only if name not in STAGES]
        if unknown:
            raise UsageError(f"{unknown[0]}: is no stage; give some of {', '.join(STAGES)}")
        request = Request(arguments.out, arguments.nanogpt, arguments.torch, arguments.text)
        if arguments.stage_seconds is not None:
            name = arguments.only[0]
            status = run_stage(name, STAGES[name].run, request, arguments.stage_seconds)
        else:
            status = prove(request, 60 * arguments.minutes, arguments.only, argv)
    sys.exit(status)


def prove(request: Request, seconds: float, only: Sequence[str], argv: Sequence[str]) -> int:
    """Run the stages that are missing, and print and write what all have found.

    Raises:
        UsageError: if the folder cannot be written, or another process is at work in it.
    """
    deadline = time.monotonic() + seconds - MARGIN
    ended: dict[str, StageResult] = {}
    with locked(request.out):
        for name, stage in STAGES.items():
            done = read_result(request.out / name, name)
            missing = done is None or done.status != "done"
            left = deadline - time.monotonic()
            if not missing or (only and name not in only) or left < LEAST:
                continue
            bound = min(stage.seconds, left)
            print(f"{name}: at most {bound:.0f} s", file=sys.stderr, flush=True)
            ended[name] = run_process(name, request, bound, argv)
            report(request.out, ended)
        found = report(request.out, ended)
        print((request.out / "prove.md").read_text())
    return exit_status([result for result in found if not only or result.stage in only])


def run_process(name: str, request: Request, bound: float, argv: Sequence[str]) -> StageResult:
    """Run one stage in a process group of its own, which ends with it and with its time."""
    folder = request.out / name
    options = [word for word in argv if word not in STAGES]
    command = [sys.executable, "-m", "jaxgpt.doctor", "prove", name, *options]
    began = time.monotonic()
    try:
        shutil.rmtree(folder, ignore_errors=True)  # what an earlier try has left
        folder.mkdir(parents=True)
        with (folder / "stage.log").open("w") as log:
            process = subprocess.Popen(
                [*command, "--stage-seconds", f"{bound:.0f}"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status = process.wait(bound)
                reason = f"ended with status {status}; see {folder / 'stage.log'}"
            except subprocess.TimeoutExpired:
                reason = ""
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    except OSError as error:
        reason = f"{folder}: cannot be written ({error.strerror or error})"
    result = read_result(folder, name) or StageResult(name)
    if result.status == "running":
        result.status = "failed" if reason else "cut off"
        result.reason = reason or f"not done within its {bound:.0f} s"
        result.seconds = time.monotonic() - began
        with contextlib.suppress(OSError, UsageError):
            result.write(folder)
    return result


def report(out: Path, ended: Mapping[str, StageResult]) -> list[StageResult]:
    """Write prove.json and prove.md of what is known; return it by stage.

    Args:
        ended: the stages of this call; those of earlier ones are read from their folders.
    """
    results = []
    for name in STAGES:
        found = ended.get(name) or read_result(out / name, name)
        results.append(found or StageResult(name, "cut off", "not run: no time was left"))
    values = {
        "jaxgpt": __version__,
        "python": platform.python_version(),
        "versions": package_versions(),
        "host": platform.node(),
        "on_gpu": accelerator_expected(),
        "stages": [asdict(result) for result in results],
    }
    atomic_write_text(out / "prove.json", json.dumps(values, indent=1))
    heading = f"jaxgpt {__version__} on {device_of(results)}, jax {values['versions']['jax']}"
    atomic_write_text(out / "prove.md", markdown(results, heading))
    return results


def exit_status(results: Sequence[StageResult]) -> int:
    if any(r.status == "failed" or any(row.met is False for row in r.rows) for r in results):
        return shutdown.FAILED
    if any(r.status in ("cut off", "running") for r in results):
        return shutdown.STOPPED
    return shutdown.DONE


def device_of(results: Sequence[StageResult]) -> str:
    rows = [row for result in results for row in result.rows if row.name == "devices"]
    return str(rows[0].value) if rows else platform.node()


@contextlib.contextmanager
def locked(out: Path) -> Iterator[None]:
    """Hold the folder for this process.

    Raises:
        UsageError: if it cannot be written, or is held.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        file = (out / "lock").open("w")
    except OSError as error:
        raise UsageError(
            f"--out={out}: cannot be written ({error.strerror or error}); give a folder that can"
        ) from None
    with file:
        if lock_file(file) == "taken":
            raise UsageError(f"--out={out}: another prove is at work there; give another folder")
        yield
