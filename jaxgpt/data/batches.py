"""The batch of a step: where its rows come from, and their tokens; without JAX.

It is a pure function of (data, seed, step), and going to a step costs O(1).
"""

from typing import Any, NamedTuple

import numpy as np

from jaxgpt.config import Config, step_ranges
from jaxgpt.data.blend import Blend
from jaxgpt.data.dataset import Dataset
from jaxgpt.data.sampler import EpochSampler


class RowLocation(NamedTuple):
    """Where a row comes from."""

    corpus: int
    source: int
    offset: int
    """Number of its first token in the source's split."""


class BatchReader:
    """Batches of one split, by step."""

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
        """
        Args:
            block_size: T; a row is T+1 tokens.
            batch_size: rows per step, B.
            seed: order of the data.
            random_steps: ranges of steps, both ends included, whose tokens are drawn at random:
                a rehearsed fault.
        """
        self.names = dataset.corpora
        self.shape = (batch_size, block_size + 1)
        self._splits = [source.tokens[split] for source in dataset.sources]
        self._vocab_size = dataset.vocab_size
        self._seed = seed
        self._random_steps = random_steps
        self._blend = Blend(
            [source.entry.weight for source in dataset.sources],
            [self.names.index(source.entry.corpus) for source in dataset.sources],
        )
        self._samplers = [
            EpochSampler(tokens.size, block_size, seed, stream)
            for stream, tokens in enumerate(self._splits)
        ]

    def row_locations(self, step: int, rows: range | None = None) -> list[RowLocation]:
        """Return where some rows (by default all) of a step's batch come from."""
        out = []
        for row in range(self.shape[0]) if rows is None else rows:
            corpus, source, number = self._blend[(step - 1) * self.shape[0] + row]
            out.append(RowLocation(corpus, source, self._samplers[source].offset(number)))
        return out

    def corpora(self, step: int) -> np.ndarray:
        """Return the corpus (its number in `names`) of each row of a step: int, shape (B,)."""
        return np.array([location.corpus for location in self.row_locations(step)])

    def tokens_consumed(self, step: int) -> list[int]:
        """Return the tokens of each corpus in the batches of all steps up to `step`."""
        return [n * (self.shape[1] - 1) for n in self._blend.counts(step * self.shape[0])]

    def is_random(self, step: int) -> bool:
        """Return whether a step has random tokens, a rehearsed fault."""
        return any(first <= step <= last for first, last in self._random_steps)

    def read(self, step: int, rows: range) -> np.ndarray:
        """Return some rows of a step's batch: int32, shape (rows, T+1).

        Raises:
            UsageError: if a file cannot be read, or a token is outside the vocabulary.
        """
        if self.is_random(step):
            return self._random(step, rows)
        out = np.empty((len(rows), self.shape[1]), np.int32)
        for row, location in zip(out, self.row_locations(step, rows), strict=True):
            split = self._splits[location.source]
            tokens = split.read(location.offset, len(row))
            split.check_vocab_range(tokens, location.offset, self._vocab_size)
            row[:] = tokens
        return out

    def _random(self, step: int, rows: range) -> np.ndarray:
        """Draw each row by itself, so that it is the same on every mesh."""
        return np.stack(
            [
                np.random.default_rng([self._seed, step, row]).integers(
                    self._vocab_size, size=self.shape[1], dtype=np.int32
                )
                for row in rows
            ]
        )


def training_batches(dataset: Dataset, config: Config) -> BatchReader:
    """Return the reader of the global batches that a run trains on."""
    return BatchReader(dataset, "train", **training_options(config))


def training_options(config: Config) -> dict[str, Any]:
    """Return the options of `BatchReader` that a configuration sets for training."""
    return {
        "block_size": config.model.block_size,
        "batch_size": config.train.batch_size,
        "seed": config.train.seed,
        "random_steps": step_ranges("faults.random_tokens", config.faults.random_tokens),
    }
