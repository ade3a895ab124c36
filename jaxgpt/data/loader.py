"""Rows of tokens as global arrays over the mesh, read ahead in a thread."""

import itertools
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxgpt.config import Config
from jaxgpt.data.batches import BatchReader, training_options
from jaxgpt.data.dataset import Dataset


class Loader(BatchReader):
    """Batches of one split. The batch of a step depends on nothing but the step."""

    def __init__(self, dataset: Dataset, split: str, *, sharding: NamedSharding, **options: Any):
        """A loader whose batches have shape (B, T+1) and the given sharding.

        Args:
            options: those of `BatchReader`.
        """
        super().__init__(dataset, split, **options)
        self._sharding = sharding

    @classmethod
    def for_training(cls, dataset: Dataset, config: Config, sharding: NamedSharding) -> "Loader":
        """Return global batches of the training split."""
        return cls(dataset, "train", sharding=sharding, **training_options(config))

    @classmethod
    def for_evaluation(
        cls, dataset: Dataset, split: str, config: Config, sharding: NamedSharding
    ) -> "Loader":
        """Return batches of the size of a microbatch, of either split, in another order."""
        return cls(
            dataset,
            split,
            block_size=config.model.block_size,
            batch_size=config.microbatch_size,
            seed=config.train.seed + 1,
            sharding=sharding,
        )

    def batch(self, step: int) -> jax.Array:
        """Return the global batch of `step`: int32, shape (B, T+1).

        Each process reads only the rows of its own devices.
        """
        parts: dict[range, np.ndarray] = {}

        def part(index: tuple[slice, ...]) -> np.ndarray:
            rows = range(self.shape[0])[index[0]]
            if rows not in parts:  # devices along `tensor` hold the same rows
                parts[rows] = self.read(step, rows)
            return parts[rows]

        return jax.make_array_from_callback(self.shape, self._sharding, part)

    def batches(self, steps: Iterable[int], ahead: int = 2) -> Iterator[jax.Array]:
        """Yield the batches of `steps`, with up to `ahead` of them read before they are due."""
        steps = iter(steps)
        with ThreadPoolExecutor(1, thread_name_prefix="loader") as thread:
            waiting = [thread.submit(self.batch, step) for step in itertools.islice(steps, ahead)]
            try:
                while waiting:
                    batch = waiting.pop(0).result()
                    waiting += [thread.submit(self.batch, s) for s in itertools.islice(steps, 1)]
                    yield batch
            finally:
                thread.shutdown(cancel_futures=True)
