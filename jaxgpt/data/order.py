"""Which tokens a step trains on: a pure function of (data, seed, step), in O(1).

An epoch cuts the tokens into windows of T+1 (inputs and their successors) that begin T apart,
at a phase of its own, and visits them in a permutation of its own. The first and last window
are moved inside the file, so every token is seen in every epoch.
"""

import functools
import importlib.util
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxgpt.data.blend import Blend

SHUFFLE_MODULE = "grain._src.python.experimental.index_shuffle.python.index_shuffle_module"
SHUFFLE_ROUNDS = 4  # those of MapDataset.shuffle


class Windows:
    """Number of a sample -> offset of its row in a token file."""

    def __init__(self, n_tokens: int, block_size: int, seed: int, stream: int = 0):
        """Order of one split of one source.

        Args:
            n_tokens: tokens in the file, at least `block_size + 1`.
            block_size: T.
            seed: another seed, another order.
            stream: so does another stream.
        """
        assert n_tokens > block_size, (n_tokens, block_size)
        self._shuffle = index_shuffle()
        self._last_start = n_tokens - 1 - block_size
        self._block_size = block_size
        self._seeds = [seed, stream] if stream else [seed]
        # One window more than fits: the phase leaves a part at either end.
        self.per_epoch = math.ceil((n_tokens - 1) / block_size) + 1
        self._epoch = functools.lru_cache(maxsize=2)(self._phase_and_shuffle)

    def start(self, number: int) -> int:
        """Offset of sample `number`, from 0: its row is the T+1 tokens from there on."""
        epoch, within = divmod(number, self.per_epoch)
        phase, shuffle = self._epoch(epoch)
        window = self._shuffle(
            within, max_index=self.per_epoch - 1, seed=shuffle, rounds=SHUFFLE_ROUNDS
        )
        return min(max(phase + (window - 1) * self._block_size, 0), self._last_start)

    def _phase_and_shuffle(self, epoch: int) -> tuple[int, int]:
        """Phase in 1..T, and the seed of the permutation of the windows."""
        first, *stream = self._seeds
        phase, shuffle = np.random.SeedSequence([first, epoch, *stream]).generate_state(2)
        return 1 + int(phase) % self._block_size, int(shuffle)


class Place(NamedTuple):
    """Where a row comes from."""

    corpus: int
    source: int
    start: int
    """Offset of its first token in the source's split."""


class DataOrder:
    """Step -> the places of its rows."""

    def __init__(self, blend: Blend, windows: Sequence[Windows], batch_size: int):
        """
        Args:
            windows: of each source of the blend.
            batch_size: rows per step, B.
        """
        self._blend = blend
        self._windows = windows
        self._batch_size = batch_size

    def places(self, step: int, rows: range) -> list[Place]:
        """Where some rows of `step` (from 1) come from."""
        first = (step - 1) * self._batch_size
        out = []
        for row in rows:
            corpus, source, number = self._blend.draw(first + row)
            out.append(Place(corpus, source, self._windows[source].start(number)))
        return out

    def consumed(self, step: int) -> list[int]:
        """Rows of each corpus in the batches of all steps up to `step`."""
        return self._blend.counts(step * self._batch_size)


@functools.cache
def index_shuffle() -> Callable[..., int]:
    """Grain's permutation, computed index by index: that of `MapDataset.range(n).shuffle(seed)`.

    It is loaded by itself: all of grain takes as long to import as the rest of a warm start.
    """
    if SHUFFLE_MODULE not in sys.modules:
        (folder,) = importlib.util.find_spec("grain").submodule_search_locations
        file = Path(folder).parent / (SHUFFLE_MODULE.replace(".", "/") + ".so")
        spec = importlib.util.spec_from_file_location(SHUFFLE_MODULE, file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[SHUFFLE_MODULE] = module  # for grain, which must not load it a second time
    return sys.modules[SHUFFLE_MODULE].index_shuffle
