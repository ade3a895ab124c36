"""Time to save and to restore a state, beside plain files of the same number and sizes.

Both sides are on the disk when they count as written: Orbax calls fsync for every file that holds
numbers. Before both are read, the page cache forgets them.
"""

import re
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxgpt.bench import plain_files
from jaxgpt.bench.progress import tell
from jaxgpt.bench.scratch import scratch_folder
from jaxgpt.cluster.process_group import ProcessGroup, join_process_group
from jaxgpt.config import Config, UsageError, check_batch, mesh_sizes
from jaxgpt.data.dataset import vocabulary_size
from jaxgpt.doctor.directory import file_system_of
from jaxgpt.runtime.initialize import initialize_jax

IN_MEMORY = ("tmpfs", "ramfs")  # file systems that are the page cache
# After one that counts for nothing; an even number, as what comes second may take longer: a
# virtual machine has memory at hand for the first, and asks its host for more.
ROUNDS = 8
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def measure(config: Config, size: int | None, directory: Path | None) -> dict[str, Any]:
    """Saves and restores a state eight times.

    Args:
        size: about how many bytes it is to have, by the number of layers; None keeps the model.
        directory: where to write; by default where temporary files are.

    Returns:
        Seconds of the slowest process, as medians over the rounds, and their ratios to those of
        plain files.
    """
    cluster = join_process_group(config.init_timeout)
    with scratch_folder(cluster, directory) as folder:
        vocab_size = cluster.run_on_all(vocabulary_size, config.data, config.model)
        config = config.replace(model__vocab_size=vocab_size)
        initialize_jax(cluster, mesh_sizes(config))
        import jax

        from jaxgpt.parallel.mesh import make_mesh
        from jaxgpt.train.step import make_steps

        sizes = mesh_sizes(config, jax.device_count())
        check_batch(config, sizes)
        if size is not None:
            config = with_bytes(config, size)
        cluster.run_on_all(check_room, config, folder)
        steps = make_steps(config, make_mesh(sizes, cluster.hosts))
        state = filled(steps)
        rounds = Rounds(config, steps, state, folder, cluster)
        found = []
        for number in range(ROUNDS + 1):
            tell(cluster, f"round {number} of {ROUNDS}" if number else "warming up")
            found.append(rounds.run(number))
        found = found[1:]
        medians = {name: statistics.median(r[name] for r in found) for name in found[0]}
        arrays = jax.tree.leaves(rounds.saved)
        file_system = file_system_of(folder)
        dropped = rounds.forgets and file_system not in IN_MEMORY
        return (
            {
                "config": config.config,
                "n_layer": config.model.n_layer,
                "state_bytes": sum(a.nbytes for a in arrays),
                "arrays": len(arrays),
                "mesh": dict(steps.mesh.shape),
                "processes": cluster.size,
                "rounds": ROUNDS,
            }
            | medians
            | {
                name: statistics.median(r[plain] / r[ours] for r in found)
                for name, plain, ours in (
                    ("save_ratio", "plain_write_seconds", "save_seconds"),
                    ("restore_ratio", "plain_read_seconds", "restore_seconds"),
                    ("restore_ratio_keeping", "plain_keep_seconds", "restore_seconds"),
                )
            }
            | {
                "page_cache": "dropped" if dropped else "warm",
                "file_system": file_system,
                "directory": str(folder.parent),
            }
        )


def bytes_of(option: str, given: str | None) -> int | None:
    """An option's number of bytes, such as 1GB or 500MB; None if it is not given.

    Raises:
        UsageError: if it is not one.
    """
    if given is None:
        return None
    number = re.fullmatch(r"(\d+(?:\.\d+)?)(KB|MB|GB|TB)", given.upper())
    if number is None:
        raise UsageError(f"{option}={given}: must be a size such as 500MB or 1GB")
    return int(float(number[1]) * UNITS[number[2]])


def with_bytes(config: Config, size: int) -> Config:
    """The configuration with so many layers that a state has about `size` bytes.

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
    """Of a state: parameters and two moments, float32."""
    from jaxgpt.models.transformer import count_parameters

    return 3 * 4 * count_parameters(config.model)[0]


def check_room(config: Config, folder: Path) -> None:
    """Looks for room on the disk for a checkpoint and as many plain files.

    Raises:
        UsageError: if there is less.
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
    """Saves, restores, and the same with plain files, each round in another order."""

    def __init__(self, config: Config, steps: Any, state: Any, folder: Path, cluster: ProcessGroup):
        from jaxgpt.train.state import checkpoint_tree

        self.forgets = True
        """Whether nothing is in the page cache before it is read."""
        self.saved = checkpoint_tree(state)
        self._config = config.replace(spike__action="log", checkpoint__keep=1)
        self._shapes, self._cluster = checkpoint_tree(steps.state_shapes), cluster
        self._ours, self._plain = folder / "checkpoint", folder / "plain"
        self._sizes: list[int] = []
        self._written: list[tuple[str, int]] = []
        """The plain files of this process: the processes share them, as those of a checkpoint."""

    def run(self, number: int) -> dict[str, float]:
        """Seconds of one round; the first round is 0."""
        found: dict[str, float] = {}
        # Plain files are as many and as large as those of a checkpoint, which comes first once.
        writes = [self._save, self._write_plain]
        reads = [self._restore, self._read_plain, self._read_and_keep_plain]
        for part in (writes, reads):
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

    def _write_plain(self) -> dict[str, float]:
        self._empty(self._plain)
        names = [(str(number), size) for number, size in enumerate(self._sizes)]
        self._written = names[self._cluster.rank :: self._cluster.size]
        _, seconds = self._timed(plain_files.write, self._plain, self._written)
        return {"plain_write_seconds": seconds}

    def _restore(self) -> dict[str, float]:
        import jax
        import numpy as np

        from jaxgpt.checkpoint.checkpointer import Checkpoints

        checkpoints = Checkpoints(self._ours, self._config)
        self._forget(self._ours)
        (tree, _), seconds = self._timed(
            lambda: jax.block_until_ready(checkpoints.restore(1, self._shapes))
        )
        checkpoints.close()
        for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(self.saved), strict=True):
            for x, y in zip(a.addressable_shards, b.addressable_shards, strict=True):
                assert np.array_equal(np.asarray(x.data), np.asarray(y.data))
        return {"restore_seconds": seconds}

    def _read_plain(self) -> dict[str, float]:
        self._forget(self._plain)
        _, seconds = self._timed(plain_files.read, self._plain, self._written)
        return {"plain_read_seconds": seconds}

    def _read_and_keep_plain(self) -> dict[str, float]:
        self._forget(self._plain)
        _, seconds = self._timed(plain_files.read_and_keep, self._plain, self._written)
        return {"plain_keep_seconds": seconds}

    def _timed(self, act: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
        """What `act` returns, and the seconds of the slowest process."""
        self._cluster.barrier()
        began = time.perf_counter()
        result = act(*arguments)
        return result, max(self._cluster.allgather(time.perf_counter() - began))

    def _empty(self, folder: Path) -> None:
        if self._cluster.is_main:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        self._cluster.barrier()

    def _forget(self, folder: Path) -> None:
        if self._cluster.local_rank == 0:
            self.forgets = plain_files.forget(folder)
        self._cluster.barrier()


def describe(found: dict[str, Any]) -> str:
    """What `measure` found, in words."""
    several = "processes" if found["processes"] > 1 else "process"
    mesh = " ".join(f"{axis}={n}" for axis, n in found["mesh"].items())
    cache = (
        "read from the disk, not the page cache"
        if found["page_cache"] == "dropped"
        else "read from the page cache"
    )
    return "\n".join(
        [
            f"checkpoint: {found['config']} with {found['n_layer']} layers, "
            f"{found['state_bytes'] / 1e9:.3f} GB in {found['arrays']} arrays; "
            f"{found['processes']} {several}, mesh {mesh}",
            f"in: {found['directory']} ({found['file_system']}); medians of {found['rounds']} "
            f"rounds; {cache}",
            f"save: {found['save_seconds']:.2f} s until {found['files']:.0f} files "
            f"({found['file_bytes'] / 1e9:.3f} GB) are on the disk, of which training waits "
            f"{found['save_blocks_seconds']:.2f} s",
            f"      {found['save_ratio']:.0%} of plain files, {found['plain_write_seconds']:.2f} s",
            f"restore: {found['restore_seconds']:.2f} s",
            f"      {found['restore_ratio']:.0%} of reading plain files into one buffer, "
            f"{found['plain_read_seconds']:.2f} s",
            f"      {found['restore_ratio_keeping']:.0%} of reading them into new memory, as a "
            f"restore must, {found['plain_keep_seconds']:.2f} s",
        ]
    )
