"""Which tokens a step trains on: a pure function of (data, seed, step), in O(1).

An epoch cuts the tokens into windows of T+1 (inputs and their successors) that begin T apart,
at a phase of its own, and visits them in a permutation of its own. The first and last window
are moved inside the file, so every token is seen in every epoch.
"""

import functools
import math

import numpy as np


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
        import grain  # heavy: when it is needed, but before the first step is due

        assert n_tokens > block_size, (n_tokens, block_size)
        self._grain = grain
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
            phase, permuted = self._epoch(epoch)
            start = phase + (permuted[within] - 1) * self._block_size
            out.append(min(max(start, 0), self._last_start))
        return out

    @functools.lru_cache(maxsize=2)  # noqa: B019 - a loader keeps its order as long as it lives
    def _epoch(self, epoch: int):
        """Phase in 1..T, and the permutation of the windows, computed index by index."""
        phase, shuffle = np.random.SeedSequence([self._seed, epoch]).generate_state(2)
        windows = self._grain.MapDataset.range(self.windows_per_epoch).shuffle(seed=int(shuffle))
        return 1 + int(phase) % self._block_size, windows
