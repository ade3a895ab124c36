"""Time from the start of a process to the end of its first step, beside Python's imports alone.

A cold start compiles everything; a warm one finds it in the compile cache that the cold one left.
"""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxgpt.bench.harness import (
    PROG,
    Result,
    child_environment,
    log_progress,
    scratch_folder,
    timed,
)
from jaxgpt.cluster.environment import find_launch
from jaxgpt.cluster.launchers import find_mpiexec
from jaxgpt.cluster.process_group import ProcessGroup
from jaxgpt.config import UsageError, parse_args, skip_ranges
from jaxgpt.perf.units import count

IMPORTS = "import jax, flax.nnx, optax"
ONE_STEP = (
    "train.max_iters=1",
    "train.eval_iters=1",
    "train.eval_interval=0",
    "train.sample_tokens=0",
    "profile_steps=None",
)


def run(settings: Sequence[str], runs: int = 3, processes: int | None = None) -> Result:
    """Start training again and again.

    Args:
        settings: as for jaxgpt.train.
        runs: cold and warm starts, by turns.
        processes: started by mpiexec; None starts one without it.

    Returns:
        Seconds, as medians over the runs; of several processes those of the slowest.

    Raises:
        UsageError: if jaxgpt.train raises one, if step 1 is skipped, or if a launcher has started
            this process.
    """
    config = parse_args(settings, PROG)
    if any(first == 1 for first, _ in skip_ranges(config)):
        raise UsageError(
            f"train_range_to_skip={' '.join(map(str, config.train_range_to_skip))}: bench startup "
            "waits for step 1, which is skipped; leave it out"
        )
    launch = find_launch(os.environ)
    if launch.through is not None:  # commands would take its variables for their own
        raise UsageError(
            f"{launch.variable}: bench startup starts the processes itself; run it without the "
            "launcher, with --processes N"
        )
    launcher = [find_mpiexec(), "-n", str(processes)] if processes else []
    train = [*launcher, sys.executable, "-m", "jaxgpt.train", *settings, *ONE_STEP]
    imports = [sys.executable, "-c", IMPORTS]
    run_command(imports)  # reads the files from the disk
    alone, starts = [], {"cold": [], "warm": []}
    cluster = ProcessGroup("bench")
    with scratch_folder(cluster) as folder:
        for number in range(runs):
            log_progress(cluster, f"run {number + 1} of {runs}, cold and warm")
            alone.append(timed(lambda: run_command(imports))[1])
            for kind, found in starts.items():
                out = folder / f"{kind}-{number}"  # a new one: in an old one a run would resume
                run_command([*train, "--out", str(out)], folder / f"compiled-{number}")
                found.append(json.loads((out / "startup.json").read_text()))
    values = {
        "settings": list(settings),
        "processes": processes or 1,
        "runs": runs,
        "imports_seconds": statistics.median(alone),
        **{kind: medians(found) for kind, found in starts.items()},
        "warm_per_imports": statistics.median(
            w["total"]["max"] / a for w, a in zip(starts["warm"], alone, strict=True)
        ),
    }
    return Result(values, rows(values))


def run_command(command: list[str], compile_cache: Path | None = None) -> None:
    """Run a command to its end.

    Raises:
        UsageError: if it ends with one.
    """
    environment = child_environment()
    if compile_cache is not None:
        environment["JAX_COMPILATION_CACHE_DIR"] = str(compile_cache)
    ended = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if ended.returncode != 0:
        errors = [e for e in ended.stdout.splitlines() if e.startswith("error: ")]
        if ended.returncode == 2 and errors:
            raise UsageError(errors[0].removeprefix("error: "))
        raise RuntimeError(f"{' '.join(command)} ended with {ended.returncode}:\n{ended.stdout}")


def medians(starts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return medians over the startup.json of several runs."""
    totals = [start["total"]["max"] for start in starts]
    return {
        "seconds": statistics.median(totals),
        "least": min(totals),
        "most": max(totals),
        "phases": {
            phase: statistics.median(start["phases"][phase]["max"] for start in starts)
            for phase in starts[0]["phases"]
        },
        "compile_cache": starts[0]["compile_cache"],
    }


def rows(values: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the values in words."""

    def row(kind: str) -> tuple[str, str]:
        start = values[kind]
        phases = ", ".join(f"{phase} {s:.2f}" for phase, s in start["phases"].items())
        return kind, (
            f"{start['seconds']:.2f} s from process start to first step done "
            f"({start['least']:.2f} to {start['most']:.2f}; compile cache: "
            f"{start['compile_cache']}): {phases}"
        )

    return [
        ("startup", f"{' '.join(values['settings']) or 'tiny'}; "
         f"{count(values['processes'], 'process', 'es')}, medians of {values['runs']} runs"),
        row("cold"),
        row("warm"),
        ("imports", f'{values["imports_seconds"]:.2f} s for python -c "{IMPORTS}"; a warm start '
         f"takes {values['warm_per_imports']:.2f} times as long"),
    ]  # fmt: skip
