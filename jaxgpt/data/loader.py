"""Rows of tokens as global arrays over the mesh, read ahead in a thread."""

import itertools
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxgpt.config import Config, step_ranges
from jaxgpt.data.blend import Blend
from jaxgpt.data.order import DataOrder, Place, Windows
from jaxgpt.data.sources import Dataset


class Loader:
    """Batches of one split. The batch of a step depends on nothing but the step."""

    def __init__(
        self,
        dataset: Dataset,
        split: str,
        *,
        block_size: int,
        batch_size: int,
        seed: int,
        sharding: NamedSharding | None = None,
        random_steps: tuple[tuple[int, int], ...] = (),
    ):
        """A loader whose batches have shape (B, T+1) and the given sharding.

        Args:
            sharding: None for a loader that only reads.
            random_steps: ranges of steps, both ends included, whose tokens are drawn at random:
                a rehearsed fault.
        """
        self.names = dataset.corpora
        self._files = [source.tokens[split] for source in dataset.sources]
        self._vocab_size = dataset.vocab_size
        self._shape = (batch_size, block_size + 1)
        self._seed = seed
        self._sharding = sharding
        self._random_steps = random_steps
        self._order = DataOrder(
            Blend(
                [source.entry.weight for source in dataset.sources],
                [self.names.index(source.entry.corpus) for source in dataset.sources],
            ),
            [
                Windows(file.size, block_size, seed, stream)
                for stream, file in enumerate(self._files)
            ],
            batch_size,
        )

    @classmethod
    def for_training(
        cls, dataset: Dataset, config: Config, sharding: NamedSharding | None = None
    ) -> "Loader":
        """Global batches of the training split."""
        return cls(
            dataset,
            "train",
            block_size=config.model.block_size,
            batch_size=config.train.batch_size,
            seed=config.train.seed,
            sharding=sharding,
            random_steps=step_ranges("faults.random_tokens", config.faults.random_tokens),
        )

    @classmethod
    def for_evaluation(
        cls, dataset: Dataset, split: str, config: Config, sharding: NamedSharding
    ) -> "Loader":
        """Batches of the size of a microbatch, of either split, in another order."""
        return cls(
            dataset,
            split,
            block_size=config.model.block_size,
            batch_size=config.microbatch_size,
            seed=config.train.seed + 1,
            sharding=sharding,
        )

    @property
    def batch_shape(self) -> jax.ShapeDtypeStruct:
        """What `batch` returns, without reading it."""
        return jax.ShapeDtypeStruct(self._shape, np.int32, sharding=self._sharding)

    def places(self, step: int, rows: range | None = None) -> list[Place]:
        """Where rows of a step's batch, all by default, come from."""
        return self._order.places(step, range(self._shape[0]) if rows is None else rows)

    def corpora(self, step: int) -> np.ndarray:
        """Number of the corpus, in `names`, that each row of a step comes from: int, shape (B,)."""
        return np.array([place.corpus for place in self.places(step)])

    def consumed(self, step: int) -> list[int]:
        """Tokens of each corpus in the batches of all steps up to `step`."""
        return [rows * (self._shape[1] - 1) for rows in self._order.consumed(step)]

    def read(self, step: int, rows: range) -> np.ndarray:
        """The tokens of some rows of a step's batch: int32, shape (rows, T+1)."""
        if any(first <= step <= last for first, last in self._random_steps):
            return self._random(step, rows)
        out = np.empty((len(rows), self._shape[1]), np.int32)
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
                    self._vocab_size, size=self._shape[1], dtype=np.int32
                )
                for row in rows
            ]
        )

    def batch(self, step: int) -> jax.Array:
        """The global batch of `step`: int32, shape (B, T+1).

        Each process reads only the rows of its own devices.
        """
        parts: dict[range, np.ndarray] = {}

        def part(index: tuple[slice, ...]) -> np.ndarray:
            rows = range(self._shape[0])[index[0]]
            if rows not in parts:  # devices along `tensor` hold the same rows
                parts[rows] = self.read(step, rows)
            return parts[rows]

        return jax.make_array_from_callback(self._shape, self._sharding, part)

    def batches(self, steps: Iterable[int], ahead: int = 2) -> Iterator[jax.Array]:
        """The batches of `steps` in turn, with up to `ahead` of them read before they are due."""
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
