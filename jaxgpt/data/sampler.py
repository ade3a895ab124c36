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

from jaxgpt.data.interleave import Blend

SHUFFLE_MODULE = "grain._src.python.experimental.index_shuffle.python.index_shuffle_module"
SHUFFLE_ROUNDS = 4  # those of MapDataset.shuffle
# Grain's permutation of n is one of 2^16 at least, walked 2^16 / n times for each index: up to so
# many windows it is slower than reading them, and all are sorted by random numbers instead.
FEW_WINDOWS = 1024


class EpochSampler:
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
        self._last_start = n_tokens - 1 - block_size
        self._block_size = block_size
        self._seeds = [seed, stream] if stream else [seed]
        # One window more than fits: the phase leaves a part at either end.
        self.per_epoch = math.ceil((n_tokens - 1) / block_size) + 1
        self._epoch = functools.lru_cache(maxsize=2)(self._phase_and_windows)

    def start(self, number: int) -> int:
        """Offset of sample `number`, from 0: its row is the T+1 tokens from there on."""
        epoch, within = divmod(number, self.per_epoch)
        phase, window = self._epoch(epoch)
        return min(max(phase + (window(within) - 1) * self._block_size, 0), self._last_start)

    def _phase_and_windows(self, epoch: int) -> tuple[int, Callable[[int], int]]:
        """Phase in 1..T, and the permutation of the windows."""
        first, *stream = self._seeds
        drawn = np.random.SeedSequence([first, epoch, *stream])
        phase, shuffle = map(int, drawn.generate_state(2))
        if self.per_epoch <= FEW_WINDOWS:
            windows = np.argsort(drawn.generate_state(2 + self.per_epoch)[2:], kind="stable")
            return 1 + phase % self._block_size, windows.astype(np.uint16).item
        options = {"max_index": self.per_epoch - 1, "seed": shuffle, "rounds": SHUFFLE_ROUNDS}
        return 1 + phase % self._block_size, functools.partial(index_shuffle(), **options)


class Place(NamedTuple):
    """Where a row comes from."""

    corpus: int
    source: int
    start: int
    """Offset of its first token in the source's split."""


class DataOrder:
    """Step -> the places of its rows."""

    def __init__(self, blend: Blend, windows: Sequence[EpochSampler], batch_size: int):
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
