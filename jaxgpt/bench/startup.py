"""Time from the start of a process to the end of its first step, beside Python's imports alone.

A cold start compiles everything; a warm one finds it in the compile cache that the cold one left.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxgpt.bench.alone import of_its_own, refuse_launcher
from jaxgpt.bench.progress import tell
from jaxgpt.bench.scratch import scratch_folder
from jaxgpt.cluster.launchers import find_mpiexec
from jaxgpt.cluster.process_group import ProcessGroup
from jaxgpt.config import Config, UsageError, skip_ranges

IMPORTS = "import jax, flax.nnx, optax"
ONE_STEP = (
    "train.max_iters=1",
    "train.eval_iters=1",
    "train.eval_interval=0",
    "train.sample_tokens=0",
    "profile_steps=None",
)


def refuse_without_a_first_step(config: Config) -> None:
    """Step 1 is what is waited for.

    Raises:
        UsageError: if it is skipped.
    """
    if any(first == 1 for first, _ in skip_ranges(config)):
        shown = " ".join(map(str, config.train_range_to_skip))
        raise UsageError(
            f"train_range_to_skip={shown}: bench startup waits for step 1, which is skipped; "
            "leave it out"
        )


def measure(settings: Sequence[str], n_runs: int, n_processes: int | None) -> dict[str, Any]:
    """Starts training again and again.

    Args:
        settings: those of jaxgpt.train.
        n_runs: cold and warm starts, by turns.
        n_processes: which mpiexec starts; None starts one without it.

    Returns:
        Seconds, as medians over the runs; of several processes those of the slowest.

    Raises:
        UsageError: if jaxgpt.train does, or if this process is one of several.
    """
    refuse_launcher("startup", "run it without the launcher, with --processes N")
    launcher = [find_mpiexec(), "-n", str(n_processes)] if n_processes else []
    train = [*launcher, sys.executable, "-m", "jaxgpt.train", *settings, *ONE_STEP]
    imports = [sys.executable, "-c", IMPORTS]
    run(imports)  # reads the files from the disk
    alone, cold, warm = [], [], []
    cluster = ProcessGroup("bench")
    with scratch_folder(cluster) as folder:
        for number in range(n_runs):
            tell(cluster, f"run {number + 1} of {n_runs}, cold and warm")
            alone.append(run(imports))
            # `--out` names a new directory: with an old one a run would resume.
            for kind, found in (("cold", cold), ("warm", warm)):
                out = folder / f"{kind}-{number}"
                run([*train, "--out", str(out)], folder / f"compiled-{number}")
                found.append(json.loads((out / "startup.json").read_text()))
    return {
        "settings": list(settings),
        "processes": n_processes or 1,
        "runs": n_runs,
        "imports_seconds": statistics.median(alone),
        "cold": medians(cold),
        "warm": medians(warm),
        "warm_per_imports": statistics.median(
            w["total"]["max"] / a for w, a in zip(warm, alone, strict=True)
        ),
    }


def run(command: list[str], compile_cache: Path | None = None) -> float:
    """Runs a command to its end, and returns its seconds.

    Raises:
        UsageError: if it ends with one.
    """
    environment = of_its_own()
    if compile_cache is not None:
        environment["JAX_COMPILATION_CACHE_DIR"] = str(compile_cache)
    began = time.perf_counter()
    ended = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    seconds = time.perf_counter() - began
    if ended.returncode != 0:
        errors = [e for e in ended.stdout.splitlines() if e.startswith("error: ")]
        if ended.returncode == 2 and errors:
            raise UsageError(errors[0].removeprefix("error: "))
        raise RuntimeError(f"{' '.join(command)} ended with {ended.returncode}:\n{ended.stdout}")
    return seconds


def medians(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Of startup.json of several runs."""
    totals = [f["total"]["max"] for f in found]
    return {
        "seconds": statistics.median(totals),
        "least": min(totals),
        "most": max(totals),
        "phases": {
            phase: statistics.median(f["phases"][phase]["max"] for f in found)
            for phase in found[0]["phases"]
        },
        "compile_cache": found[0]["compile_cache"],
    }


def describe(found: dict[str, Any]) -> str:
    """What `measure` found, in words."""

    def line(kind: str) -> str:
        start = found[kind]
        phases = ", ".join(f"{phase} {s:.2f}" for phase, s in start["phases"].items())
        return (
            f"{kind}: {start['seconds']:.2f} s from process start to first step done "
            f"({start['least']:.2f} to {start['most']:.2f}; compile cache: "
            f"{start['compile_cache']}): {phases}"
        )

    several = "processes" if found["processes"] > 1 else "process"
    return "\n".join(
        [
            f"startup: {' '.join(found['settings']) or 'tiny'}; {found['processes']} {several}, "
            f"medians of {found['runs']} runs",
            line("cold"),
            line("warm"),
            f'imports: {found["imports_seconds"]:.2f} s for python -c "{IMPORTS}"; a warm start '
            f"takes {found['warm_per_imports']:.2f} times as long",
        ]
    )
