"""Time from process start to the end of the first step, compared with imports alone.

A cold start compiles everything. A warm start uses the compile cache that a cold start filled.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from jaxgpt.bench.harness import PROG, Result, Value, open_job, spread
from jaxgpt.cluster.environment import check_no_launcher
from jaxgpt.cluster.launchers import find_mpiexec
from jaxgpt.config import UsageError, parse_args, skip_ranges
from jaxgpt.train.init_from import initial_model

IMPORTS = "import jax, flax.nnx, optax"
ONE_STEP = (
    "train.max_iters=1",
    "train.eval_iters=1",
    "train.eval_interval=0",
    "train.sample_tokens=0",
    "train.trackers=",
    "checkpoint.keep_best=0",
    "profile_steps=None",
)


def run(settings: Sequence[str], runs: int = 3, processes: int | None = None) -> Result:
    """Time `runs` cold and `runs` warm starts of jaxgpt.train, alternating between the two.

    `settings` are command-line settings. Each start runs `processes` processes under mpiexec. If
    `processes` is None, each start is a single process without mpiexec. If compile_cache=off is
    set, warm starts also compile.

    Raises `UsageError` if a setting is invalid, if jaxgpt.train reports a usage error, if step 1 is
    skipped, if mpiexec is needed but missing, or if a launcher started this process. Raises
    `RuntimeError` if a start fails for any other reason, or if the imports fail.
    """
    config = parse_args(settings, PROG, initial_model)
    if any(first == 1 for first, _ in skip_ranges(config)):
        given = " ".join(map(str, config.train_range_to_skip))
        raise UsageError(f"train_range_to_skip={given}: skips step 1, which bench startup measures")
    check_no_launcher("run bench startup without one, and use --processes N")
    launcher = [find_mpiexec(), "-n", str(processes)] if processes else []
    train = [*launcher, sys.executable, "-m", "jaxgpt.train", *settings, *ONE_STEP]
    imports = [sys.executable, "-c", IMPORTS]
    _run_command(imports)  # warms the page cache
    alone: list[float] = []
    starts: dict[str, list[dict[str, Any]]] = {"cold": [], "warm": []}
    with open_job(config) as job:
        for number in range(runs):
            job.log(f"run {number + 1} of {runs}, cold and warm")
            alone.append(_run_command(imports))
            for kind, found in starts.items():
                out = job.folder / f"{kind}-{number}"  # a new folder, so that no run resumes
                cache = str(job.folder / f"compiled-{number}")
                _run_command([*train, "--out", str(out)], JAX_COMPILATION_CACHE_DIR=cache)
                found.append(json.loads((out / "startup.json").read_text()))
                shutil.rmtree(out)  # with the checkpoint that the run saved at its end
    values = {"settings": list(settings), "processes": processes or 1, "runs": runs}
    values |= {kind: Value(medians(found), "s") for kind, found in starts.items()}
    ratios = [w["total"]["max"] / a for w, a in zip(starts["warm"], alone, strict=True)]
    return values | {
        "imports_seconds": Value(statistics.median(alone), "s", IMPORTS),
        "warm_per_imports": Value(statistics.median(ratios), "x"),
    }


def medians(starts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the spread of the total time, and the median time of each phase, in seconds.

    `starts` contains the startup.json of each start, and must not be empty. The total and the time
    of each phase are maxima over the processes. The result has the keys of `spread`, plus `phases`
    and the first start's `compile_cache`.
    """
    found, first = spread([start["total"]["max"] for start in starts]), starts[0]
    found["phases"] = {
        phase: statistics.median(start["phases"][phase]["max"] for start in starts)
        for phase in first["phases"]
    }
    return found | {"compile_cache": first["compile_cache"]}


def _run_command(command: list[str], **variables: str) -> float:
    """Run a command to completion. Return its duration in seconds.

    `variables` are added to the command's environment. Raises `UsageError` if the command reports
    a usage error, and `RuntimeError` if it fails in another way.
    """
    env = os.environ | variables
    began = time.perf_counter()
    ended = subprocess.run(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if ended.returncode != 0:
        errors = [e for e in ended.stdout.splitlines() if e.startswith("error: ")]
        if ended.returncode == 2 and errors:
            raise UsageError(errors[0].removeprefix("error: "))
        raise RuntimeError(f"{' '.join(command)} exited with {ended.returncode}:\n{ended.stdout}")
    return time.perf_counter() - began
