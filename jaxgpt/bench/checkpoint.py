"""Time to save and to restore a state, beside plain files of the same number and sizes.

Both sides count as written when they are on the disk: Orbax calls fsync for every file that holds
numbers. Before both are read, the page cache forgets them.
"""

import mmap
import os
import re
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxgpt.bench.harness import PROG, Result, log_progress, scratch_folder
from jaxgpt.cluster.process_group import ProcessGroup, join_process_group
from jaxgpt.config import Config, UsageError, mesh_shape, names_config, parse_args
from jaxgpt.data.dataset import vocabulary_size
from jaxgpt.doctor.directory import IN_MEMORY, file_system_of
from jaxgpt.perf.units import count
from jaxgpt.runtime.initialize import initialize_jax

# After one that counts for nothing; an even number, as what comes second may take longer: a
# virtual machine has memory at hand for the first, and asks its host for more.
ROUNDS = 8
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
BLOCK = 2**23  # bytes of a plain file that are written or read at a time


def run(settings: Sequence[str], size: str | None = None, out: Path | None = None) -> Result:
    """Save and restore a state eight times.

    Args:
        settings: as for jaxgpt.train; without a --config gpt2 with a state of 1 GB.
        size: of the state, such as 1GB, by the number of layers; None keeps the model.
        out: where to write; by default where temporary files are.

    Returns:
        Seconds of the slowest process, as medians over the rounds, and the ratios of plain files
        to them.

    Raises:
        UsageError: if there is no room, or the size or the mesh cannot work.
    """
    if not names_config(settings):
        size, settings = size or "1GB", ["--config", "gpt2", *settings]
    n_bytes = None if size is None else bytes_of(size)
    config = parse_args(settings, PROG)
    cluster = join_process_group(config.init_timeout)
    with scratch_folder(cluster, out) as folder:
        vocab_size = cluster.run_on_all(vocabulary_size, config.data, config.model)
        config = config.replace(model__vocab_size=vocab_size)
        initialize_jax(cluster, mesh_shape(config))
        import jax

        from jaxgpt.parallel.mesh import job_mesh
        from jaxgpt.train.functions import make_steps

        mesh = job_mesh(config, cluster.hosts)
        if n_bytes is not None:
            config = with_bytes(config, n_bytes)
        cluster.run_on_all(check_room, config, folder)
        steps = make_steps(config, mesh)
        rounds = Rounds(config, steps, filled(steps), folder, cluster)
        found = []
        for number in range(ROUNDS + 1):
            log_progress(cluster, f"round {number} of {ROUNDS}" if number else "warming up")
            found.append(rounds.run(number))
        arrays, file_system = jax.tree.leaves(rounds.saved), file_system_of(folder)
        values = {
            "config": config.config,
            "n_layer": config.model.n_layer,
            "state_bytes": sum(a.nbytes for a in arrays),
            "arrays": len(arrays),
            "mesh": dict(steps.mesh.shape),
            "processes": cluster.size,
            "rounds": ROUNDS,
            **medians(found[1:]),
            "page_cache": "dropped" if rounds.drops and file_system not in IN_MEMORY else "warm",
            "file_system": file_system,
            "directory": str(folder.parent),
        }
        return Result(values, rows(values))


def medians(found: list[dict[str, float]]) -> dict[str, float]:
    """Return the medians of what rounds found, and the medians of their ratios."""
    ratios = (
        ("save_ratio", "plain_write_seconds", "save_seconds"),
        ("restore_ratio", "plain_read_seconds", "restore_seconds"),
        ("restore_ratio_keeping", "plain_keep_seconds", "restore_seconds"),
    )
    return {name: statistics.median(r[name] for r in found) for name in found[0]} | {
        name: statistics.median(r[plain] / r[ours] for r in found) for name, plain, ours in ratios
    }


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
    import jax

    from jaxgpt.train.state import init_state

    state = jax.eval_shape(lambda: init_state(config))
    arrays = jax.tree.leaves((state.params, state.opt_state))
    return sum(a.size * a.dtype.itemsize for a in arrays)


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


def filled(steps: Any) -> Any:
    """Return an initial state whose optimizer state is not zero: as after some steps."""
    import jax

    state = steps.init()
    shardings = jax.tree.map(lambda s: s.sharding, steps.state_shapes.opt_state)
    fill = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), out_shardings=shardings)
    return state._replace(opt_state=fill(state.opt_state))


class Rounds:
    """Saving and restoring, and the same with plain files, each round in another order."""

    def __init__(self, config: Config, steps: Any, state: Any, folder: Path, cluster: ProcessGroup):
        from jaxgpt.train.state import checkpoint_tree

        self.drops = True
        """Whether the page cache can be emptied."""
        self.saved = checkpoint_tree(state)
        self._config = config.replace(spike__action="log", checkpoint__keep=1)
        self._shapes, self._cluster = checkpoint_tree(steps.state_shapes), cluster
        self._ours, self._plain = folder / "checkpoint", folder / "plain"
        self._files: list[tuple[Path, int]] = []
        """The plain files of this process, with their bytes: processes share them, as Orbax's."""
        self._block = memoryview(np.random.default_rng(0).bytes(BLOCK))  # not to be compressed
        self._sizes: list[int] = []

    def run(self, number: int) -> dict[str, float]:
        """Return the seconds of one round; the first round is 0."""
        found: dict[str, float] = {}
        # Plain files are as many and as large as those of a checkpoint, which comes first once.
        for part in (self._save, self._write), (self._restore, self._read, self._read_and_keep):
            for act in part if number % 2 == 0 else reversed(part):
                found |= act()
        return found

    def _save(self) -> dict[str, float]:
        from jaxgpt.checkpoint.checkpointer import Checkpoints

        self._empty(self._ours)
        checkpoints = Checkpoints(self._ours, self._config)

        def save() -> float:
            began = time.perf_counter()
            checkpoints.save(1, self.saved, {})
            blocked = time.perf_counter() - began
            checkpoints.close()
            return blocked

        blocked, seconds = self._timed(save)
        sizes = sorted(f.stat().st_size for f in self._ours.rglob("*") if f.is_file())
        self._sizes = sizes = self._cluster.broadcast(sizes)
        return {
            "save_blocks_seconds": max(self._cluster.allgather(blocked)),
            "save_seconds": seconds,
            "files": len(sizes),
            "file_bytes": sum(sizes),
        }

    def _write(self) -> dict[str, float]:
        """Write plain files from memory, each of them to the disk (fsync)."""
        self._empty(self._plain)
        files = [(self._plain / str(number), size) for number, size in enumerate(self._sizes)]
        self._files = files[self._cluster.rank :: self._cluster.size]

        def write() -> None:
            for path, size in self._files:
                with path.open("wb", buffering=0) as file:
                    while size:
                        size -= file.write(self._block[:size])
                    os.fsync(file.fileno())

        return {"plain_write_seconds": self._timed(write)[1]}

    def _restore(self) -> dict[str, float]:
        import jax

        from jaxgpt.checkpoint.checkpointer import Checkpoints

        checkpoints = Checkpoints(self._ours, self._config)
        self._drop(self._ours)
        (tree, _), seconds = self._timed(
            lambda: jax.block_until_ready(checkpoints.restore(1, self._shapes))
        )
        checkpoints.close()
        for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(self.saved), strict=True):
            for x, y in zip(a.addressable_shards, b.addressable_shards, strict=True):
                assert np.array_equal(np.asarray(x.data), np.asarray(y.data))
        return {"restore_seconds": seconds}

    def _read(self) -> dict[str, float]:
        """Read plain files into one buffer, over and over, as `dd` does."""
        self._drop(self._plain)
        buffer = bytearray(BLOCK)

        def read() -> None:
            for path, _ in self._files:
                with path.open("rb", buffering=0) as file:
                    while file.readinto(buffer):
                        pass

        return {"plain_read_seconds": self._timed(read)[1]}

    def _read_and_keep(self) -> dict[str, float]:
        """Read plain files into memory of their own, which the system provides page by page."""
        self._drop(self._plain)

        def read() -> list[mmap.mmap]:
            kept = []
            for path, size in self._files:
                kept.append(mmap.mmap(-1, max(size, 1)))
                view, done = memoryview(kept[-1]), 0
                with path.open("rb", buffering=0) as file:
                    while done < size:
                        done += file.readinto(view[done : min(size, done + BLOCK)])
            return kept

        return {"plain_keep_seconds": self._timed(read)[1]}

    def _timed(self, act: Callable[[], Any]) -> tuple[Any, float]:
        """Return what `act` returns, and the seconds of the slowest process."""
        self._cluster.barrier()
        began = time.perf_counter()
        result = act()
        return result, max(self._cluster.allgather(time.perf_counter() - began))

    def _empty(self, folder: Path) -> None:
        if self._cluster.is_main:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        self._cluster.barrier()

    def _drop(self, folder: Path) -> None:
        """Let the page cache drop all files of a folder, so that reading asks the disk."""
        self.drops = hasattr(os, "posix_fadvise")  # macOS has none
        if self.drops and self._cluster.local_rank == 0:
            for path in filter(Path.is_file, folder.rglob("*")):
                with path.open("rb") as file:
                    os.fsync(file.fileno())
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        self._cluster.barrier()


def rows(values: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the values in words."""
    mesh = " ".join(f"{axis}={n}" for axis, n in values["mesh"].items())
    cached = values["page_cache"] != "dropped"
    return [
        ("checkpoint", f"{values['config']} with {values['n_layer']} layers, "
         f"{values['state_bytes'] / 1e9:.3f} GB in {values['arrays']} arrays; "
         f"{count(values['processes'], 'process', 'es')}, mesh {mesh}"),
        ("in", f"{values['directory']} ({values['file_system']}); medians of {values['rounds']} "
         f"rounds; read from the {'page cache' if cached else 'disk, not the page cache'}"),
        ("save", f"{values['save_seconds']:.2f} s until {values['files']:.0f} files "
         f"({values['file_bytes'] / 1e9:.3f} GB) are on the disk; training stalls "
         f"{values['save_blocks_seconds']:.2f} s"),
        ("", f"{values['save_ratio']:.0%} of plain files, {values['plain_write_seconds']:.2f} s"),
        ("restore", f"{values['restore_seconds']:.2f} s"),
        ("", f"{values['restore_ratio']:.0%} of reading plain files into one buffer, "
         f"{values['plain_read_seconds']:.2f} s"),
        ("", f"{values['restore_ratio_keeping']:.0%} of reading them into new memory, as a "
         f"restore must, {values['plain_keep_seconds']:.2f} s"),
    ]  # fmt: skip
