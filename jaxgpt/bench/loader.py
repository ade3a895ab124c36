"""Tokens per second from the files to global arrays, beside rows of a memory map.

Those are what nanoGPT's get_batch takes: at random, with nothing checked and on no device.
"""

import os
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from jaxgpt.cluster.hardware import own_cpus
from jaxgpt.config import Config, UsageError, check_batch, mesh_sizes
from jaxgpt.data.dataset import open_dataset
from jaxgpt.data.token_file import TokenFile

WARM_UP = 5  # batches


def use_cpus(wanted: int | None) -> None:
    """Keeps this process on so many CPUs of those that it may use.

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


def measure(config: Config, batches: int) -> dict[str, Any]:
    """Times five rounds of so many batches each, after a warm-up.

    Returns:
        Tokens per second (median, least and most of the rounds), those of as many rows of a
        memory map of the largest file, the ratio of both, and by how many bytes the process has
        grown since it began to read (None where the system does not say).
    """
    from jaxgpt.cluster.process_group import join_process_group
    from jaxgpt.runtime.initialize import initialize_jax

    cluster = join_process_group(config.init_timeout)
    dataset = cluster.run_on_all(open_dataset, config.data, config.model)
    config = config.replace(model__vocab_size=dataset.vocab_size)
    initialize_jax(cluster, mesh_sizes(config))
    import jax

    from jaxgpt.data.loader import Loader
    from jaxgpt.parallel.mesh import make_mesh
    from jaxgpt.parallel.sharding import batch_sharding

    sizes = mesh_sizes(config, jax.device_count())
    check_batch(config, sizes)
    mesh = make_mesh(sizes, cluster.hosts)
    idle = resident_bytes()
    loader = Loader.for_training(dataset, config, batch_sharding(mesh))
    jax.block_until_ready(list(loader.batches(range(1, WARM_UP + 1))))
    tokens = batches * config.train.batch_size * config.model.block_size
    files = [file for source in dataset.sources for file in source.tokens["train"].files]
    largest = max(files, key=lambda file: file.size)
    rows, length = -(-config.train.batch_size // cluster.size), config.model.block_size + 1
    rates, plain, most, step = [], [], 0, WARM_UP + 1
    for _ in range(5):
        began = time.perf_counter()
        for batch in loader.batches(range(step, step + batches)):
            jax.block_until_ready(batch)
            most = max(most, resident_bytes() or 0)
        rates.append(tokens / (time.perf_counter() - began))
        step += batches
        seconds = seconds_of_a_memory_map(largest, rows, length, batches)
        plain.append(tokens / seconds)
    return {
        "config": config.config,
        "tokens_per_sec": statistics.median(rates),
        "tokens_per_sec_least": min(rates),
        "tokens_per_sec_most": max(rates),
        "memory_map_tokens_per_sec": statistics.median(plain),
        "ratio": statistics.median(a / b for a, b in zip(rates, plain, strict=True)),
        "grown_bytes": None if idle is None else max(0, most - idle),
        "data_bytes": sum(
            tokens.size * tokens.dtype.itemsize
            for source in dataset.sources
            for tokens in source.tokens.values()
        ),
        "block_size": config.model.block_size,
        "batch_size": config.train.batch_size,
        "processes": cluster.size,
    }


def seconds_of_a_memory_map(stored: TokenFile, rows: int, length: int, batches: int) -> float:
    """Return the seconds of batches of rows from random places of a memory map of a file."""
    tokens, places = np.memmap(stored.path, stored.dtype, "r"), np.random.default_rng(0)
    began = time.perf_counter()
    for _ in range(batches):
        starts = places.integers(tokens.size - length + 1, size=rows)
        np.stack([tokens[start : start + length].astype(np.int64) for start in starts])
    return time.perf_counter() - began


def resident_bytes() -> int | None:
    """Resident memory of this process, where the system says it in Linux's way."""
    statm = Path("/proc/self/statm")
    if not statm.exists():  # macOS
        return None
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def describe(found: dict[str, Any]) -> str:
    """What `measure` found, in words."""
    several = "processes" if found["processes"] > 1 else "process"
    grown = "-" if found["grown_bytes"] is None else f"{found['grown_bytes'] / 2**20:.0f} MiB"
    return (
        f"loader: {found['tokens_per_sec'] / 1e6:.1f} million tokens/s (median of 5; "
        f"{found['tokens_per_sec_least'] / 1e6:.1f} to {found['tokens_per_sec_most'] / 1e6:.1f}), "
        f"{found['batch_size']} rows of {found['block_size']} tokens, {found['processes']} "
        f"{several}\n"
        f"ratio: {found['ratio']:.2f} x as many as rows of a memory map at random places, "
        f"{found['memory_map_tokens_per_sec'] / 1e6:.1f} million tokens/s\n"
        f"memory: {grown} above idle, for "
        f"{found['data_bytes'] / 2**30:.1f} GiB of data"
    )
