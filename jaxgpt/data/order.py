"""Which tokens a step trains on: a pure function of (data, seed, step), in O(1).

An epoch cuts the tokens into windows of T+1 (inputs and their successors) that begin T apart,
at a phase of its own, and visits them in a permutation of its own. The first and last window
are moved inside the file, so every token is seen in every epoch.
"""

import functools
import importlib.util
import math
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

SHUFFLE_MODULE = "grain._src.python.experimental.index_shuffle.python.index_shuffle_module"
SHUFFLE_ROUNDS = 4  # those of MapDataset.shuffle


class DataOrder:
    """Step -> offsets of rows in a token file."""

    def __init__(self, n_tokens: int, block_size: int, batch_size: int, seed: int):
        """Order of one split.

        Args:
            n_tokens: tokens in the file, at least `block_size + 1`.
            block_size: T.
            batch_size: rows per step, B.
            seed: another seed, another order.
        """
        assert n_tokens > block_size, (n_tokens, block_size)
        self._shuffle = index_shuffle()
        self._last_start = n_tokens - 1 - block_size
        self._block_size = block_size
        self._batch_size = batch_size
        self._seed = seed
        # One window more than fits: the phase leaves a part at either end.
        self.windows_per_epoch = math.ceil((n_tokens - 1) / block_size) + 1

    def starts(self, step: int, rows: range) -> list[int]:
        """Offsets of some rows of `step` (from 1); a row is the T+1 tokens from its offset on."""
        first = (step - 1) * self._batch_size
        out = []
        for row in rows:
            epoch, within = divmod(first + row, self.windows_per_epoch)
            phase, shuffle = self._epoch(epoch)
            window = self._shuffle(
                within, max_index=self.windows_per_epoch - 1, seed=shuffle, rounds=SHUFFLE_ROUNDS
            )
            start = phase + (window - 1) * self._block_size
            out.append(min(max(start, 0), self._last_start))
        return out

    @functools.lru_cache(maxsize=2)  # noqa: B019 - a loader keeps its order as long as it lives
    def _epoch(self, epoch: int) -> tuple[int, int]:
        """Phase in 1..T, and the seed of the permutation of the windows."""
        phase, shuffle = np.random.SeedSequence([self._seed, epoch]).generate_state(2)
        return 1 + int(phase) % self._block_size, int(shuffle)


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
