"""Time to save and restore a checkpoint, compared with plain files of the same sizes.

Writes are timed until the data is on disk. TensorStore calls fsync for every file that holds
arrays. On Linux, files are dropped from the page cache before they are read.
"""

import os
import shutil
import statistics
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import jax
import numpy as np

from jaxgpt.bench.harness import PROG, BenchJob, Result, Value, open_job
from jaxgpt.checkpoint.checkpointer import Checkpoints, Tree
from jaxgpt.config import Config, parse_args
from jaxgpt.doctor.directory import file_system_of
from jaxgpt.train.init_from import initial_model
from jaxgpt.train.jitted import make_steps
from jaxgpt.train.state import checkpoint_tree

ROUNDS = 8  # after one warm-up; even, because the order alternates
ONE_GIGABYTE = ("--config", "gpt2", "model.n_layer=6")


def run(settings: Sequence[str], out: Path | None = None) -> Result:
    """Measure the time to save and restore a checkpoint, and to write and read plain files.

    There are eight rounds after a warm-up. `settings` are command-line settings. By default, the
    checkpoint is 1 GB. `out` is the folder to write to, by default the system's temporary
    folder. All hosts must share it. In the folder checkpoint.local, if there is one, the benchmark
    leaves subfolders, which are empty if it succeeds.

    Raises `UsageError` if the folder has too little space, if a setting is invalid, or if a save
    fails. Raises `OSError` if a plain file cannot be written or read.
    """
    if not any(word.startswith(("--config", "config=")) for word in settings):
        settings = [*ONE_GIGABYTE, *settings]
    config = parse_args(settings, PROG, initial_model)
    with open_job(config, out=out) as job:
        config, mesh = job.start_jax(config)
        config = config.replace(spike__action="log", checkpoint__keep=1)
        steps = make_steps(config, mesh)
        shapes = checkpoint_tree(steps.state_shapes)
        Checkpoints(job.folder, config, job.cluster).open(shapes)
        state = steps.init()
        # Make the moments nonzero, as they are during training.
        state = state._replace(opt_state=jax.tree.map(lambda x: x + 1, state.opt_state))
        tree = checkpoint_tree(state)
        writes = [partial(save, job, config, tree), partial(_write_files, job)]
        reads = [partial(restore, job, config, shapes), partial(_read_files, job)]
        rounds = []
        for number in range(ROUNDS + 1):
            job.log(f"round {number} of {ROUNDS}" if number else "warming up")
            found: dict[str, float] = {}
            for turn in writes + reads:
                found |= turn()
            rounds.append(found)
            writes.reverse()
            reads.reverse()
        sizes = _file_sizes(job)
        return {
            "config": config.config,
            "n_layer": config.model.n_layer,
            "state_bytes": Value(sum(a.nbytes for a in jax.tree.leaves(tree)), "bytes"),
            "mesh": dict(mesh.shape),
            "processes": job.cluster.size,
            "directory": str(job.folder.parent),
            "file_system": file_system_of(job.folder),
            "files": len(sizes),
            "file_bytes": Value(sum(sizes), "bytes"),
            "rounds": ROUNDS,
            **medians(rounds[1:]),
        }


def medians(rounds: list[dict[str, float]]) -> dict[str, Value]:
    """Return the median time of each operation, and the median speed relative to plain files.

    Each round is a dict that combines the results of `save`, `restore`, `_write_files` and
    `_read_files`. There must be at least one round. The result has the same keys, plus the relative
    speeds `save_ratio` and `restore_ratio` (1 = equal).
    """
    out = {name: Value(statistics.median(r[name] for r in rounds), "s") for name in rounds[0]}
    for ours, plain in (("save", "write"), ("restore", "read")):
        ratios = [r[f"plain_{plain}_seconds"] / r[f"{ours}_seconds"] for r in rounds]
        out[f"{ours}_ratio"] = Value(statistics.median(ratios), "%", "of the speed of plain files")
    return out


def save(job: BenchJob, config: Config, tree: Tree) -> dict[str, float]:
    """Measure the time to write all files of a checkpoint to disk.

    This replaces any earlier checkpoint in the job's folder. Returns two durations in seconds, each
    for the slowest process: `save_seconds` until the save has finished, and `save_blocks_seconds`
    until training can continue. All processes must call this. Raises `OSError` on process 0 if the
    checkpoint's folder cannot be removed or created.
    """
    checkpoints = Checkpoints(_empty_folder(job, "checkpoint"), config, job.cluster)

    meta = {
        "config": config.to_dict(), "batch_sizes": [],
        "data_fingerprint": [], "tokenizer": None, "jax": jax.__version__, "mesh": "",
        "processes": job.cluster.size,
    }  # fmt: skip

    def save_and_close() -> float:
        began = time.perf_counter()
        checkpoints.save(1, tree, meta)
        blocked = time.perf_counter() - began
        checkpoints.close()
        return blocked

    blocked, seconds = job.timed(save_and_close)
    return {"save_blocks_seconds": max(job.cluster.allgather(blocked)), "save_seconds": seconds}


def restore(job: BenchJob, config: Config, shapes: Tree) -> dict[str, float]:
    """Measure the time to restore and verify the checkpoint that `save` wrote.

    Returns `restore_seconds`, the time of the slowest process in seconds. All processes must call
    this. Raises `OSError` if a file of the checkpoint cannot be opened or flushed.
    """
    checkpoints = Checkpoints(job.folder / "checkpoint", config, job.cluster)
    _drop_cached(job, "checkpoint")
    _, seconds = job.timed(lambda: jax.block_until_ready(checkpoints.restore(1, shapes)))
    checkpoints.close()
    return {"restore_seconds": seconds}


def _file_sizes(job: BenchJob) -> list[int]:
    """Return the sizes of the checkpoint files in bytes, in ascending order.

    All processes must call this.
    """
    files = (job.folder / "checkpoint").rglob("*")
    return job.cluster.broadcast(sorted(f.stat().st_size for f in files if f.is_file()))


def _write_files(job: BenchJob) -> dict[str, float]:
    """Measure the time to write plain files of the same sizes as the checkpoint files to disk."""
    folder, sizes = _empty_folder(job, "plain"), _file_sizes(job)
    largest = memoryview(np.random.default_rng(0).bytes(max(sizes)))  # incompressible

    def write() -> None:
        # Each process writes a share of the files, as in an Orbax save.
        for number in range(job.cluster.rank, len(sizes), job.cluster.size):
            with (folder / str(number)).open("wb") as file:
                file.write(largest[: sizes[number]])
                file.flush()
                os.fsync(file.fileno())

    return {"plain_write_seconds": job.timed(write)[1]}


def _read_files(job: BenchJob) -> dict[str, float]:
    """Measure the time to read the plain files into newly allocated memory, as a restore does."""
    _drop_cached(job, "plain")
    files = sorted((job.folder / "plain").iterdir())[job.cluster.rank :: job.cluster.size]
    return {"plain_read_seconds": job.timed(lambda: [file.read_bytes() for file in files])[1]}


def _empty_folder(job: BenchJob, name: str) -> Path:
    folder = job.folder / name
    if job.cluster.is_main:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    job.cluster.barrier()
    return folder


def _drop_cached(job: BenchJob, name: str) -> None:
    """Drop all files of a folder from the page cache, so that they are read from disk."""
    if hasattr(os, "posix_fadvise") and job.cluster.local_rank == 0:  # macOS lacks it
        for path in filter(Path.is_file, (job.folder / name).rglob("*")):
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    job.cluster.barrier()
