"""Speed of loading tokens from files into global arrays, compared with reading a memory map.

The rows of the memory map are read as in nanoGPT's get_batch: from random positions and without
checks. They are not copied to a device.
"""

import operator
import statistics
from collections.abc import Sequence

import jax
import numpy as np

from jaxgpt.bench.harness import PROG, Result, Value, open_job, spread
from jaxgpt.config import parse_args
from jaxgpt.data.dataset import open_dataset
from jaxgpt.data.loader import Loader
from jaxgpt.parallel.sharding import batch_sharding
from jaxgpt.perf.memory import peak_rss
from jaxgpt.train.init_from import initial_model

WARM_UP = 5  # batches
ROUNDS = 5


def run(settings: Sequence[str], batches: int = 40) -> Result:
    """After a warm-up, time five rounds that each load `batches` global batches.

    Each round also times direct reads of about the same number of rows from a memory map.
    `settings` are command-line settings.
    """
    config = parse_args(settings, PROG, initial_model)
    with open_job(config) as job:
        dataset = job.cluster.run_on_all(open_dataset, config.data, config.model)
        config, mesh = job.start_jax(config)
        B, T = config.train.batch_size, config.model.block_size
        files = [source.tokens["train"].file for source in dataset.sources]
        largest = max(files, key=lambda file: file.size)
        idle = peak_rss()
        loader = Loader.for_training(dataset, config, batch_sharding(mesh))
        jax.block_until_ready(list(loader.batches(range(1, WARM_UP + 1))))

        def load(first: int) -> None:
            for batch in loader.batches(range(first, first + batches)):
                jax.block_until_ready(batch)

        def read_memory_map() -> None:
            tokens, places = np.memmap(largest.path, largest.dtype, "r"), np.random.default_rng(0)
            for _ in range(batches):
                starts = places.integers(tokens.size - T, size=-(-B // job.cluster.size))
                np.stack([tokens[start : start + T + 1].astype(np.int64) for start in starts])

        loaded, mapped = [], []
        for number in range(ROUNDS):
            first = WARM_UP + 1 + number * batches
            loaded.append(batches * B * T / job.timed(lambda first=first: load(first))[1])
            mapped.append(batches * B * T / job.timed(read_memory_map)[1])
        return {
            "config": config.config,
            "batch_size": B,
            "block_size": T,
            "processes": job.cluster.size,
            "data_bytes": Value(
                sum(t.size * t.dtype.itemsize for s in dataset.sources for t in s.tokens.values()),
                "bytes",
            ),
            "grown_bytes": Value(peak_rss() - idle, "bytes", "growth of peak memory while reading"),
            "tokens_per_sec": Value(spread(loaded), "tokens/s"),
            "memory_map_tokens_per_sec": Value(spread(mapped), "tokens/s"),
            "ratio": Value(statistics.median(map(operator.truediv, loaded, mapped)), "x"),
        }
