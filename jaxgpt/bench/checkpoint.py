"""Time to save and to restore a state, beside plain files of the same number and sizes.

Both sides count as written when they are on the disk: Orbax calls fsync for every file that holds
numbers. Before both are read, the page cache forgets them.
"""

import os
import re
import shutil
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxgpt.bench.harness import PROG, Job, Result, Value, open_job
from jaxgpt.checkpoint.checkpointer import Checkpoints
from jaxgpt.config import Config, UsageError, names_config, parse_args
from jaxgpt.doctor.directory import file_system_of
from jaxgpt.train.functions import make_steps
from jaxgpt.train.state import checkpoint_tree, init_state

# After one that counts for nothing; an even number, as what comes second may take longer: a
# virtual machine has memory at hand for the first, and asks its host for more.
ROUNDS = 8
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def run(settings: Sequence[str], size: str | None = None, out: Path | None = None) -> Result:
    """Save and restore a state eight times.

    Args:
        settings: as for jaxgpt.train; without a --config gpt2 with a state of 1 GB.
        size: of the state, such as 1GB, by the number of layers; None keeps the model.
        out: where to write; by default where temporary files are.

    Raises:
        UsageError: if there is no room, or the size or the mesh cannot work.
    """
    if not names_config(settings):
        size, settings = size or "1GB", ["--config", "gpt2", *settings]
    n_bytes = None if size is None else bytes_of(size)
    config = parse_args(settings, PROG)
    with open_job(config, out=out) as job:
        config, mesh = job.start_jax(config)
        if n_bytes is not None:
            config = with_bytes(config, n_bytes)
        job.cluster.run_on_all(check_room, config, job.folder)
        steps = make_steps(config, mesh)
        state = steps.init()
        # Not zeros: as after some steps.
        state = state._replace(opt_state=jax.tree.map(lambda x: x + 1, state.opt_state))
        rounds = Rounds(config, checkpoint_tree(state), checkpoint_tree(steps.state_shapes), job)
        found = []
        for number in range(ROUNDS + 1):
            job.log(f"round {number} of {ROUNDS}" if number else "warming up")
            found.append(rounds.run(number))
        arrays = jax.tree.leaves(rounds.saved)
        values = {
            "config": config.config,
            "n_layer": config.model.n_layer,
            "state_bytes": Value(sum(a.nbytes for a in arrays), "bytes"),
            "arrays": len(arrays),
            "mesh": dict(mesh.shape),
            "processes": job.cluster.size,
            "directory": str(job.folder.parent),
            "file_system": file_system_of(job.folder),
            "files": len(rounds.sizes),
            "file_bytes": Value(sum(rounds.sizes), "bytes"),
            "rounds": ROUNDS,
            **medians(found[1:]),
        }
        return Result(values)


def medians(found: list[dict[str, float]]) -> dict[str, Value]:
    """Return the medians of what rounds found, and of their ratios to plain files."""
    out = {name: Value(statistics.median(r[name] for r in found), "s") for name in found[0]}
    for ours, plain in (("save", "write"), ("restore", "read")):
        ratios = [r[f"plain_{plain}_seconds"] / r[f"{ours}_seconds"] for r in found]
        out[f"{ours}_ratio"] = Value(statistics.median(ratios), "%", "of the speed of plain files")
    return out


def bytes_of(size: str) -> int:
    """Return the number of bytes of --size, such as 1GB or 500MB.

    Raises:
        UsageError: if it is not a size.
    """
    number = re.fullmatch(r"(\d+(?:\.\d+)?)(KB|MB|GB|TB)", size.upper())
    if number is None:
        raise UsageError(f"--size={size}: must be a size such as 500MB or 1GB")
    return int(float(number[1]) * UNITS[number[2]])


def with_bytes(config: Config, size: int) -> Config:
    """Return the configuration with so many layers that a state has about `size` bytes.

    Raises:
        UsageError: if that is less than one layer.
    """
    one, two = (state_bytes(config.replace(model__n_layer=n)) for n in (1, 2))
    if size < one - (two - one) // 2:
        raise UsageError(
            f"--size={size / 1e6:g}MB: {config.config} has {one / 1e6:.0f}MB with a single layer; "
            "give so much, or a smaller --config"
        )
    return config.replace(model__n_layer=1 + round((size - one) / (two - one)))


def state_bytes(config: Config) -> int:
    """Return the bytes of parameters and optimizer state, without allocating them."""
    tree = checkpoint_tree(jax.eval_shape(lambda: init_state(config)))
    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(tree))


def check_room(config: Config, folder: Path) -> None:
    """Check that the disk has room for a checkpoint and as many plain files.

    Raises:
        UsageError: if it has less.
    """
    size, free = state_bytes(config), shutil.disk_usage(folder).free
    if 2 * size > free:
        raise UsageError(
            f"--out={folder.parent}: has room for {free / 1e6:,.0f}MB, and a state of "
            f"{config.config} with {config.model.n_layer} layers takes {size / 1e6:,.0f}MB, twice; "
            "give a smaller --size, or another --out"
        )


class Rounds:
    """Saving and restoring, and the same with plain files, each round in another order."""

    def __init__(self, config: Config, saved: Any, shapes: Any, job: Job):
        self.saved, self._shapes, self._job = saved, shapes, job
        self.sizes: list[int] = []
        """Bytes of the files of a checkpoint."""
        self._files: list[tuple[Path, int]] = []
        """Plain files of this process, with their bytes: processes share them, as Orbax's."""
        self._config = config.replace(spike__action="log", checkpoint__keep=1)
        self._ours, self._plain = job.folder / "checkpoint", job.folder / "plain"

    def run(self, number: int) -> dict[str, float]:
        """Return the seconds of one round; the first round is 0."""
        found: dict[str, float] = {}
        # Plain files are as many and as large as those of a checkpoint, which comes first once.
        for turns in (self._save, self._write), (self._restore, self._read):
            for act in turns if number % 2 == 0 else reversed(turns):
                found |= act()
        return found

    def _save(self) -> dict[str, float]:
        self._empty(self._ours)
        checkpoints = Checkpoints(self._ours, self._config)

        def save() -> float:
            began = time.perf_counter()
            checkpoints.save(1, self.saved, {})
            blocked = time.perf_counter() - began
            checkpoints.close()
            return blocked

        blocked, seconds = self._job.timed(save)
        sizes = sorted(f.stat().st_size for f in self._ours.rglob("*") if f.is_file())
        self.sizes = self._job.cluster.broadcast(sizes)
        stall = max(self._job.cluster.allgather(blocked))
        return {"save_blocks_seconds": stall, "save_seconds": seconds}

    def _write(self) -> dict[str, float]:
        """Write plain files from memory, each of them to the disk (fsync)."""
        self._empty(self._plain)
        files = [(self._plain / str(number), size) for number, size in enumerate(self.sizes)]
        self._files = files[self._job.cluster.rank :: self._job.cluster.size]
        largest = memoryview(np.random.default_rng(0).bytes(max(self.sizes)))  # not compressible

        def write() -> None:
            for path, size in self._files:
                with path.open("wb", buffering=0) as file:
                    written = 0
                    while written < size:
                        written += file.write(largest[written:size])
                    os.fsync(file.fileno())

        return {"plain_write_seconds": self._job.timed(write)[1]}

    def _restore(self) -> dict[str, float]:
        checkpoints = Checkpoints(self._ours, self._config)
        self._drop(self._ours)
        (tree, _), seconds = self._job.timed(
            lambda: jax.block_until_ready(checkpoints.restore(1, self._shapes))
        )
        checkpoints.close()
        for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(self.saved), strict=True):
            for x, y in zip(a.addressable_shards, b.addressable_shards, strict=True):
                assert np.array_equal(np.asarray(x.data), np.asarray(y.data))
        return {"restore_seconds": seconds}

    def _read(self) -> dict[str, float]:
        """Read plain files into new memory, as a restore must."""
        self._drop(self._plain)
        read = self._job.timed(lambda: [path.read_bytes() for path, _ in self._files])
        return {"plain_read_seconds": read[1]}

    def _empty(self, folder: Path) -> None:
        if self._job.cluster.is_main:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        self._job.cluster.barrier()

    def _drop(self, folder: Path) -> None:
        """Let the page cache drop all files of a folder, so that reading asks the disk."""
        if hasattr(os, "posix_fadvise") and self._job.cluster.local_rank == 0:  # macOS has none
            for path in filter(Path.is_file, folder.rglob("*")):
                with path.open("rb") as file:
                    os.fsync(file.fileno())
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        self._job.cluster.barrier()
