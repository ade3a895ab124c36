"""The rows of a step: where they come from, and their tokens, without JAX."""

from typing import Any

import numpy as np

from jaxgpt.config import Config, step_ranges
from jaxgpt.data.dataset import Dataset
from jaxgpt.data.interleave import Blend
from jaxgpt.data.sampler import DataOrder, EpochSampler, Place


class BatchReader:
    """Rows of the batches of one split. They depend on nothing but the step."""

    def __init__(
        self,
        dataset: Dataset,
        split: str,
        *,
        block_size: int,
        batch_size: int,
        seed: int,
        random_steps: tuple[tuple[int, int], ...] = (),
    ):
        """Batches of B = `batch_size` rows of T+1 = `block_size` + 1 tokens.

        Args:
            random_steps: ranges of steps, both ends included, whose tokens are drawn at random:
                a rehearsed fault.
        """
        self.names = dataset.corpora
        self.shape = (batch_size, block_size + 1)
        self._files = [source.tokens[split] for source in dataset.sources]
        self._vocab_size = dataset.vocab_size
        self._seed = seed
        self._random_steps = random_steps
        self._order = DataOrder(
            Blend(
                [source.entry.weight for source in dataset.sources],
                [self.names.index(source.entry.corpus) for source in dataset.sources],
            ),
            [
                EpochSampler(file.size, block_size, seed, stream)
                for stream, file in enumerate(self._files)
            ],
            batch_size,
        )

    def places(self, step: int, rows: range | None = None) -> list[Place]:
        """Where rows of a step's batch, all by default, come from."""
        return self._order.places(step, range(self.shape[0]) if rows is None else rows)

    def corpora(self, step: int) -> np.ndarray:
        """Number of the corpus, in `names`, that each row of a step comes from: int, shape (B,)."""
        return np.array([place.corpus for place in self.places(step)])

    def consumed(self, step: int) -> list[int]:
        """Tokens of each corpus in the batches of all steps up to `step`."""
        return [rows * (self.shape[1] - 1) for rows in self._order.consumed(step)]

    def is_random(self, step: int) -> bool:
        """Whether a step's tokens are drawn at random, in place of those at their places."""
        return any(first <= step <= last for first, last in self._random_steps)

    def read(self, step: int, rows: range) -> np.ndarray:
        """The tokens of some rows of a step's batch: int32, shape (rows, T+1)."""
        if self.is_random(step):
            return self._random(step, rows)
        out = np.empty((len(rows), self.shape[1]), np.int32)
        for row, place in zip(out, self.places(step, rows), strict=True):
            file = self._files[place.source]
            tokens = file.read(place.start, len(row))
            file.check(tokens, place.start, self._vocab_size)
            row[:] = tokens
        return out

    def _random(self, step: int, rows: range) -> np.ndarray:
        """Each row is drawn by itself, so that it is the same on every mesh."""
        return np.stack(
            [
                np.random.default_rng([self._seed, step, row]).integers(
                    self._vocab_size, size=self.shape[1], dtype=np.int32
                )
                for row in rows
            ]
        )


def training_batches(dataset: Dataset, config: Config) -> BatchReader:
    """Rows of the global batches that a run trains on."""
    return BatchReader(dataset, "train", **training_options(config))


def training_options(config: Config) -> dict[str, Any]:
    """What of a configuration decides about the rows of a step."""
    return {
        "block_size": config.model.block_size,
        "batch_size": config.train.batch_size,
        "seed": config.train.seed,
        "random_steps": step_ranges("faults.random_tokens", config.faults.random_tokens),
    }
