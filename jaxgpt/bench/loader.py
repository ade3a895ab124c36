"""Tokens per second from the files to global arrays, beside rows of a memory map.

The rows are those of nanoGPT's get_batch: at random, with nothing checked and on no device.
"""

import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxgpt.bench.harness import PROG, Result
from jaxgpt.cluster.hardware import own_cpus
from jaxgpt.cluster.process_group import join_process_group
from jaxgpt.config import Config, UsageError, mesh_shape, parse_args
from jaxgpt.data.dataset import Dataset, open_dataset
from jaxgpt.data.token_file import TokenFile
from jaxgpt.perf.units import count
from jaxgpt.runtime.initialize import initialize_jax

WARM_UP = 5  # batches
ROUNDS = 5


def run(settings: Sequence[str], batches: int = 40, cpus: int | None = None) -> Result:
    """Time five rounds of batches, after a warm-up.

    Args:
        settings: as for jaxgpt.train.
        batches: of a round.
        cpus: how many CPUs to use; None uses all.

    Returns:
        Tokens/s, those of as many rows of a memory map of the largest file, their ratio, and by
        how many bytes the process has grown since it began to read (None where that is not said).

    Raises:
        UsageError: if the data cannot be read, or there are not so many CPUs.
    """
    config = parse_args(settings, PROG)
    use_cpus(cpus)
    cluster = join_process_group(config.init_timeout)
    dataset = cluster.run_on_all(open_dataset, config.data, config.model)
    config = config.replace(model__vocab_size=dataset.vocab_size)
    initialize_jax(cluster, mesh_shape(config))

    from jaxgpt.parallel.mesh import job_mesh
    from jaxgpt.parallel.sharding import batch_sharding

    mesh = job_mesh(config, cluster.hosts)
    seconds, plain, grown = measure(dataset, config, batch_sharding(mesh), batches, cluster.size)
    B, T = config.train.batch_size, config.model.block_size
    tokens = batches * B * T
    values = {
        "config": config.config,
        "tokens_per_sec": tokens / statistics.median(seconds),
        "tokens_per_sec_least": tokens / max(seconds),
        "tokens_per_sec_most": tokens / min(seconds),
        "memory_map_tokens_per_sec": tokens / statistics.median(plain),
        "ratio": statistics.median(b / a for a, b in zip(seconds, plain, strict=True)),
        "grown_bytes": grown,
        "data_bytes": sum(
            t.size * t.dtype.itemsize for s in dataset.sources for t in s.tokens.values()
        ),
        "block_size": T,
        "batch_size": B,
        "processes": cluster.size,
    }
    return Result(values, rows(values))


def measure(
    dataset: Dataset, config: Config, sharding: Any, batches: int, n_processes: int
) -> tuple[list[float], list[float], int | None]:
    """Return seconds of the rounds, those of a memory map, and the bytes that memory has grown."""
    import jax

    from jaxgpt.data.loader import Loader

    idle = resident_bytes()
    loader = Loader.for_training(dataset, config, sharding)
    jax.block_until_ready(list(loader.batches(range(1, WARM_UP + 1))))
    files = [file for source in dataset.sources for file in source.tokens["train"].files]
    largest = max(files, key=lambda file: file.size)
    rows, length = -(-config.train.batch_size // n_processes), config.model.block_size + 1
    seconds, plain, most, step = [], [], 0, WARM_UP + 1
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for batch in loader.batches(range(step, step + batches)):
            jax.block_until_ready(batch)
            most = max(most, resident_bytes() or 0)
        seconds.append(time.perf_counter() - began)
        step += batches
        plain.append(memory_map_seconds(largest, rows, length, batches))
    return seconds, plain, None if idle is None else max(0, most - idle)


def use_cpus(wanted: int | None) -> None:
    """Keep this process on so many CPUs of those that it may use; None keeps all.

    Raises:
        UsageError: if there are fewer, or the system does not bind processes to CPUs.
    """
    if wanted is None:
        return
    if not hasattr(os, "sched_setaffinity"):  # macOS
        raise UsageError(f"--cpus={wanted}: this system binds no process to CPUs; leave it out")
    available = own_cpus()
    if wanted > len(available):
        raise UsageError(
            f"--cpus={wanted}: this process may use {len(available)}; give at most that"
        )
    os.sched_setaffinity(0, available[:wanted])


def memory_map_seconds(stored: TokenFile, rows: int, length: int, batches: int) -> float:
    """Return the seconds of batches of rows from random places, copied from a memory map."""
    tokens, places = np.memmap(stored.path, stored.dtype, "r"), np.random.default_rng(0)
    began = time.perf_counter()
    for _ in range(batches):
        starts = places.integers(tokens.size - length + 1, size=rows)
        np.stack([tokens[start : start + length].astype(np.int64) for start in starts])
    return time.perf_counter() - began


def resident_bytes() -> int | None:
    """Return the resident memory of this process, where the system says it in Linux's way."""
    statm = Path("/proc/self/statm")
    if not statm.exists():  # macOS
        return None
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def rows(values: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the values in words."""
    grown = values["grown_bytes"]
    return [
        ("loader", f"{values['tokens_per_sec'] / 1e6:.1f} million tokens/s (median of {ROUNDS}; "
         f"{values['tokens_per_sec_least'] / 1e6:.1f} to "
         f"{values['tokens_per_sec_most'] / 1e6:.1f}), {values['batch_size']} rows of "
         f"{values['block_size']} tokens, {count(values['processes'], 'process', 'es')}"),
        ("ratio", f"{values['ratio']:.2f} x as many as rows of a memory map at random places, "
         f"{values['memory_map_tokens_per_sec'] / 1e6:.1f} million tokens/s"),
        ("memory", ("-" if grown is None else f"{grown / 2**20:.0f} MiB")
         + f" above idle, for {values['data_bytes'] / 2**30:.1f} GiB of data"),
    ]  # fmt: skip
