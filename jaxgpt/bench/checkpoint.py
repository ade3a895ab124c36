"""Time to save and to restore a state, beside plain files of the same number and sizes.

Both sides count as written when they are on the disk: Orbax calls fsync for every file that holds
numbers. Before both are read, the page cache forgets them.
"""

import os
import shutil
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from jaxgpt.bench.harness import PROG, Job, Result, Value, open_job
from jaxgpt.checkpoint.checkpointer import Checkpoints, Tree
from jaxgpt.config import Config, parse_args
from jaxgpt.doctor.directory import file_system_of
from jaxgpt.train.functions import make_steps
from jaxgpt.train.state import checkpoint_tree

# After one that counts for nothing; an even number, as what comes second may take longer: a
# virtual machine has memory at hand for the first, and asks its host for more.
ROUNDS = 8
ONE_GIGABYTE = ("--config", "gpt2", "model.n_layer=6")


def run(settings: Sequence[str], out: Path | None = None) -> Result:
    """Save and restore a state eight times; without a --config one of 1 GB.

    Raises `UsageError` if there is no room, or the mesh cannot work.
    """
    if not any(word.startswith(("--config", "config=")) for word in settings):
        settings = [*ONE_GIGABYTE, *settings]
    config = parse_args(settings, PROG)
    with open_job(config, out=out) as job:
        config, mesh = job.start_jax(config)
        config = config.replace(spike__action="log", checkpoint__keep=1)
        steps = make_steps(config, mesh)
        shapes = checkpoint_tree(steps.state_shapes)
        job.cluster.run_on_all(Checkpoints(job.folder, config).check_room, 1, shapes)
        state = steps.init()
        # Not zeros: as after some steps.
        state = state._replace(opt_state=jax.tree.map(lambda x: x + 1, state.opt_state))
        tree = checkpoint_tree(state)
        sizes: list[int] = []  # of the files of a checkpoint, in bytes
        rounds = []
        for number in range(ROUNDS + 1):
            job.log(f"round {number} of {ROUNDS}" if number else "warming up")
            turns = [
                (save, job, config, tree, sizes),  # first once, for the sizes
                (write_files, job, sizes),
                (restore, job, config, shapes),
                (read_files, job, sizes),
            ]
            if number % 2:
                turns = [turns[1], turns[0], turns[3], turns[2]]
            found: dict[str, float] = {}
            for act, *arguments in turns:
                found |= act(*arguments)
            rounds.append(found)
        values = {
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
        return Result(values)


def medians(rounds: list[dict[str, float]]) -> dict[str, Value]:
    """Return the medians of the rounds' seconds, and of their ratios to plain files."""
    out = {name: Value(statistics.median(r[name] for r in rounds), "s") for name in rounds[0]}
    for ours, plain in (("save", "write"), ("restore", "read")):
        ratios = [r[f"plain_{plain}_seconds"] / r[f"{ours}_seconds"] for r in rounds]
        out[f"{ours}_ratio"] = Value(statistics.median(ratios), "%", "of the speed of plain files")
    return out


def save(job: Job, config: Config, tree: Tree, sizes: list[int]) -> dict[str, float]:
    """Save a checkpoint; the first time, put the bytes of each of its files into `sizes`."""
    folder = empty_folder(job, "checkpoint")
    checkpoints = Checkpoints(folder, config)

    def save_and_close() -> float:
        began = time.perf_counter()
        checkpoints.save(1, tree, {})
        blocked = time.perf_counter() - began
        checkpoints.close()
        return blocked

    blocked, seconds = job.timed(save_and_close)
    if not sizes:
        written = sorted(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        sizes += job.cluster.broadcast(written)
    return {"save_blocks_seconds": max(job.cluster.allgather(blocked)), "save_seconds": seconds}


def restore(job: Job, config: Config, shapes: Tree) -> dict[str, float]:
    """Restore the checkpoint, which compares its checksums."""
    folder = job.folder / "checkpoint"
    checkpoints = Checkpoints(folder, config)
    drop_cached(job, folder)
    _, seconds = job.timed(lambda: jax.block_until_ready(checkpoints.restore(1, shapes)))
    checkpoints.close()
    return {"restore_seconds": seconds}


def write_files(job: Job, sizes: list[int]) -> dict[str, float]:
    """Write plain files from memory, each of them to the disk (fsync)."""
    folder = empty_folder(job, "plain")
    largest = memoryview(np.random.default_rng(0).bytes(max(sizes)))  # not compressible

    def write() -> None:
        for number in own_files(job, sizes):
            with (folder / str(number)).open("wb") as file:
                file.write(largest[: sizes[number]])
                file.flush()
                os.fsync(file.fileno())

    return {"plain_write_seconds": job.timed(write)[1]}


def read_files(job: Job, sizes: list[int]) -> dict[str, float]:
    """Read plain files into new memory, as a restore must."""
    folder = job.folder / "plain"
    drop_cached(job, folder)
    read = job.timed(lambda: [(folder / str(n)).read_bytes() for n in own_files(job, sizes)])
    return {"plain_read_seconds": read[1]}


def own_files(job: Job, sizes: list[int]) -> range:
    """Return the numbers of this process's plain files: processes share them, as Orbax's."""
    return range(job.cluster.rank, len(sizes), job.cluster.size)


def empty_folder(job: Job, name: str) -> Path:
    folder = job.folder / name
    if job.cluster.is_main:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    job.cluster.barrier()
    return folder


def drop_cached(job: Job, folder: Path) -> None:
    """Let the page cache drop all files of a folder, so that reading asks the disk."""
    if hasattr(os, "posix_fadvise") and job.cluster.local_rank == 0:  # macOS has none
        for path in filter(Path.is_file, folder.rglob("*")):
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    job.cluster.barrier()
