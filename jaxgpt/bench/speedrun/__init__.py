"""A whole run beside a whole run of nanoGPT: wall time from the start, and the loss reached.

nanoGPT trains with the settings that its README has for a CPU. The losses are those of the whole
validation text, computed after the clock has stopped.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxgpt.bench.harness import PROG, Job, Result, Value, open_job
from jaxgpt.config import UsageError, parse_args
from jaxgpt.data.dataset import dataset_directory
from jaxgpt.train.run.resume import initial_model

WORKER = Path(__file__).with_name("worker.py")
# After every setting of ours: nothing is computed but the training, which is saved once.
TRAINING_ONLY = (
    "train.eval_interval=0", "train.sample_tokens=0", "checkpoint.interval=0", "train.trackers=",
)  # fmt: skip


def run(settings: Sequence[str], nanogpt: Path, torch: str, seeds: int = 3) -> Result:
    """Run nanoGPT and jaxgpt in turns, for each seed: jaxgpt without compiled programs, then with.

    Raises `UsageError` if either fails, or if the data is not a folder of nanoGPT's.
    """
    given = any(word.startswith(("--config", "config=")) for word in settings)
    settings = [*(() if given else ("--config", "speedrun_cpu")), *settings]
    config = parse_args(settings, PROG, initial_model)
    data = dataset_directory(config.data).absolute()
    if not (data / "train.bin").is_file():
        raise UsageError(f"{data}: has no train.bin; run python -m jaxgpt.prepare shakespeare_char")
    if not (nanogpt / "train.py").is_file():
        raise UsageError(f"--nanogpt={nanogpt}: has no train.py; give a clone of nanoGPT")
    rows = []
    with open_job(config, alone=True) as job:
        for seed in range(1, seeds + 1):
            job.log(f"seed {seed} of {seeds}: nanoGPT, which takes a minute or more")
            theirs = run_nanogpt(job, nanogpt, torch, data, seed)
            job.log(f"seed {seed} of {seeds}: jaxgpt, twice")
            cold, _ = run_jaxgpt(job, settings, seed, "cold")
            warm, loss = run_jaxgpt(job, settings, seed, "warm")
            rows.append((*theirs, cold, warm, loss))
    their_seconds, their_losses, cold, warm, losses = zip(*rows, strict=True)
    shares = {
        name: statistics.median(a / b for a, b in zip(ours, their_seconds, strict=True))
        for name, ours in (("cold", cold), ("warm", warm))
    }
    return {
        "config": config.config,
        "data": str(data),
        "seeds": seeds,
        "nanogpt_seconds": Value(list(their_seconds), "s"),
        "nanogpt_val_losses": Value(list(their_losses), note="of the whole validation text"),
        "seconds": Value(list(cold), "s", "from the start of the process, nothing compiled before"),
        "warm_seconds": Value(list(warm), "s", "with compiled programs in the cache"),
        "val_losses": Value(list(losses), note="of the whole validation text"),
        "share": Value(shares["cold"], note="of nanoGPT's wall time, median of the seeds"),
        "warm_share": Value(shares["warm"], note="the same with the cache"),
    }


def run_jaxgpt(job: Job, settings: Sequence[str], seed: int, name: str) -> tuple[float, float]:
    """Train from nothing; return seconds of the process, and the loss of the whole split."""
    out = job.folder / f"{name}-{seed}"
    cache = f"compile_cache={job.folder / 'compiled'}"
    own = [*settings, *TRAINING_ONLY, f"train.seed={seed}", cache, "--out", str(out)]
    seconds, _ = timed([sys.executable, "-m", "jaxgpt.train", *own], "jaxgpt.train")
    command = [sys.executable, "-m", "jaxgpt.evaluate", "--run", str(out), "--json"]
    _, said = timed(command, "jaxgpt.evaluate")
    return seconds, json.loads(said.splitlines()[-1])["loss"]


def run_nanogpt(job: Job, clone: Path, python: str, data: Path, seed: int) -> tuple[float, float]:
    """Do the same with nanoGPT, in a copy of its clone."""
    folder = job.folder / f"nanogpt-{seed}"
    command = [python, str(WORKER)]
    words = [str(clone.absolute()), str(folder), str(data), str(seed)]
    timed([*command, "prepare", *words], f"--torch={python}: nanoGPT")
    seconds, _ = timed([*command, "train", *words], f"--torch={python}: nanoGPT")
    _, said = timed([*command, "evaluate", *words], f"--torch={python}: nanoGPT")
    return seconds, float(said.splitlines()[-1])


def timed(command: Sequence[str], name: str) -> tuple[float, str]:
    """Run a command; return its seconds and its output. `UsageError` with its last words."""
    environment: dict[str, Any] = dict(os.environ)
    began = time.perf_counter()
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    except OSError as error:
        raise UsageError(f"{name} cannot be started ({error.strerror})") from None
    seconds = time.perf_counter() - began
    if done.returncode:
        said = (done.stdout + done.stderr).strip().rpartition("\n")[2]
        raise UsageError(f"{name} failed with status {done.returncode} ({said})")
    return seconds, done.stdout
