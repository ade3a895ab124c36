"""Batch loader with O(1) seek. A batch is a pure function of (data, config, batch sizes, step).

JAX is imported only to make global arrays, so `jaxgpt.inspect` can read rows without JAX.
"""

import itertools
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jaxgpt.config import Config, step_ranges
from jaxgpt.data.batch_sizes import BatchSizes
from jaxgpt.data.blend import Blend
from jaxgpt.data.dataset import Dataset
from jaxgpt.data.sampler import EpochSampler

if TYPE_CHECKING:
    import jax
    from jax.sharding import NamedSharding

    from jaxgpt.data.batch import TokenRows


class RowLocation(NamedTuple):
    """Location of a row in the data.

    `corpus` and `source` are indices into `Dataset.corpora` and `Dataset.sources`.
    """

    corpus: int
    source: int
    offset: int  # offset of the row's first token in the split


class Loader:
    """Random-access loader for the batches of one split, as NumPy rows or as global arrays."""

    def __init__(
        self,
        dataset: Dataset,
        split: str,
        config: Config,
        batch_sizes: BatchSizes,
        seed: int,
        sharding: "NamedSharding | None",
        random_steps: Sequence[tuple[int, int]] = (),
    ):
        """Prepare to read a split.

        Args:
            split: name of the split, which must have more than model.block_size tokens in every
                source.
            batch_sizes: number of rows in each step's batch.
            seed: seed for the sample order and the random tokens.
            sharding: sharding of the global batches; if None, only NumPy rows can be read.
            random_steps: (first, last) ranges of steps that train on random tokens.
        """
        block_size = config.model.block_size
        self.names = dataset.corpora
        self.has_masks = dataset.has_masks
        self.batch_sizes = batch_sizes
        self._row_length = block_size + 1
        self._splits = [source.tokens[split] for source in dataset.sources]
        self._vocab_size = dataset.vocab_size
        self._seed = seed
        self._random_steps = random_steps
        self._sharding = sharding
        self._blend = Blend(
            [source.entry.weight for source in dataset.sources],
            [self.names.index(source.entry.corpus) for source in dataset.sources],
        )
        self._samplers = [
            EpochSampler(tokens.size, block_size, seed, stream)
            for stream, tokens in enumerate(self._splits)
        ]

    @classmethod
    def for_training(
        cls,
        dataset: Dataset,
        config: Config,
        sharding: "NamedSharding | None" = None,
        batch_sizes: BatchSizes | None = None,
    ) -> "Loader":
        """Return a loader for a run's training batches.

        If `batch_sizes` is None, the batch size of every step is train.batch_size.
        """
        sizes = batch_sizes or BatchSizes([(1, config.train.batch_size)])
        random_steps = step_ranges("faults.random_tokens", config.faults.random_tokens)
        return cls(dataset, "train", config, sizes, config.train.seed, sharding, random_steps)

    @classmethod
    def for_evaluation(
        cls, dataset: Dataset, split: str, config: Config, sharding: "NamedSharding"
    ) -> "Loader":
        """Return a loader for microbatches of a split.

        The loader's seed differs from the training loader's. Each step is one microbatch. Steps are
        numbered from 1.
        """
        sizes = BatchSizes([(1, config.microbatch_size)])
        return cls(dataset, split, config, sizes, config.train.seed + 1, sharding)

    def sequence(self, step: int, row: int) -> int:
        """Return the index (from 0) of a row's sequence among all sequences of the run."""
        return self.batch_sizes.consumed(step - 1) + row

    def row_location(self, step: int, row: int) -> RowLocation:
        """Return the location of a row in a step's batch.

        faults.random_tokens does not affect the result.
        """
        return self._locate(self.sequence(step, row))

    def _locate(self, sequence: int) -> RowLocation:
        corpus, source, number = self._blend[sequence]
        return RowLocation(corpus, source, self._samplers[source].offset(number))

    def corpora(self, step: int) -> np.ndarray:
        """Return the corpus of each row in a step's batch, as an index into `names`: int64 (B,).

        faults.random_tokens does not affect the result.
        """
        first, end = self.batch_sizes.consumed(step - 1), self.batch_sizes.consumed(step)
        return np.array([self._locate(sequence).corpus for sequence in range(first, end)])

    def tokens_consumed(self, step: int) -> list[int]:
        """Return how many tokens steps 1 to `step` consume from each corpus, in `names` order.

        Every row counts as model.block_size tokens, even in steps that are skipped or train on
        random tokens.
        """
        counts = self._blend.counts(self.batch_sizes.consumed(step))
        return [n * (self._row_length - 1) for n in counts]

    def is_random(self, step: int) -> bool:
        """Return whether fault injection feeds random tokens to a step."""
        return any(first <= step <= last for first, last in self._random_steps)

    def read(self, step: int, rows: range) -> np.ndarray:
        """Return rows of a step's batch: int32, shape (rows, T+1).

        If `is_random(step)`, the tokens are random. Raises `UsageError` if a token is outside the
        vocabulary.
        """
        first, is_random = self.sequence(step, 0), self.is_random(step)
        out = np.empty((len(rows), self._row_length), np.int32)
        for place, row in zip(out, rows, strict=True):
            place[:] = self._random_row(step, row) if is_random else self._row(first + row)
        return out

    def _row(self, sequence: int) -> np.ndarray:
        _, source, offset = self._locate(sequence)
        tokens = self._splits[source].read(offset, self._row_length)
        self._splits[source].check_vocab_range(tokens, offset, self._vocab_size)
        return tokens

    def _random_row(self, step: int, row: int) -> np.ndarray:
        draw = np.random.default_rng([self._seed, step, row])  # the same on every mesh
        return draw.integers(self._vocab_size, size=self._row_length, dtype=np.int32)

    def read_weights(self, step: int, rows: range) -> np.ndarray:
        """Return the loss weights (0 or 1) for rows of a step's batch: uint8, (rows, T+1).

        Without a mask, all weights are 1.
        """
        first = self.sequence(step, 0)
        out = np.empty((len(rows), self._row_length), np.uint8)
        for place, row in zip(out, rows, strict=True):
            _, source, offset = self._locate(first + row)
            place[:] = self._splits[source].read_weights(offset, self._row_length)
        return out

    def batch(self, step: int) -> "jax.Array | TokenRows":
        """Return the global batch of a step: int32 (B, T+1), or `TokenRows` if the data has masks.

        The loader must have a sharding that divides the rows evenly. All processes must call this.
        """
        shape = self.batch_sizes.at(step), self._row_length
        tokens = global_array(shape, self._sharding, lambda rows: self.read(step, rows))
        if not self.has_masks:
            return tokens
        from jaxgpt.data.batch import TokenRows

        weights = global_array(shape, self._sharding, lambda rows: self.read_weights(step, rows))
        return TokenRows(tokens, weights)

    def batches(self, steps: Iterable[int]) -> Generator["jax.Array | TokenRows", None, None]:
        """Yield the batches of `steps`. A thread prefetches up to two batches.

        Close the iterator to stop the thread early.
        """
        steps = iter(steps)
        with ThreadPoolExecutor(1, thread_name_prefix="loader") as thread:
            waiting = [thread.submit(self.batch, step) for step in itertools.islice(steps, 2)]
            try:
                while waiting:
                    batch = waiting.pop(0).result()
                    waiting += [thread.submit(self.batch, s) for s in itertools.islice(steps, 1)]
                    yield batch
            finally:
                thread.shutdown(cancel_futures=True)


def global_array(
    shape: tuple[int, ...], sharding: "NamedSharding", read: Callable[[range], np.ndarray]
) -> "jax.Array":
    """Return a global array of the given shape. Only its first axis (rows) may be sharded.

    The sharding must divide the rows evenly. `read` returns the values for a range of rows, with
    the rows as the first axis. All processes must call this, and each reads only the rows on its
    devices.
    """
    import jax

    parts: dict[range, np.ndarray] = {}

    def part(index: tuple[slice, ...]) -> np.ndarray:
        rows = range(shape[0])[index[0]]
        if rows not in parts:  # devices along `tensor` hold the same rows
            parts[rows] = read(rows)
        return parts[rows]

    return jax.make_array_from_callback(shape, sharding, part)
