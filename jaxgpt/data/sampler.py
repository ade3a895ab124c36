"""Order of the rows of one source: sample number -> offset, in O(1).

An epoch cuts the tokens into windows of T+1 (inputs and their successors) that begin T apart, at
a phase of its own, and visits them in a permutation of its own. The first and last window are
moved inside the file, so every token is seen in every epoch.

The permutation is Grain's: that of `grain.MapDataset.range(n).shuffle(seed)`. It is written here
for whole blocks at a time, because importing Grain takes as long as the rest of a warm start.
"""

import functools
import math

import numpy as np

ROUNDS = 4
# Up to so many windows the permutation sorts random numbers: Grain's cipher has 2^16 values at
# least, so it would walk through 2^16 / n of them for each window.
FEW_WINDOWS = 1024
BLOCK = 1024  # windows of an epoch that are permuted together


class EpochSampler:
    """Epochs of shuffled windows over the tokens of one source."""

    def __init__(self, n_tokens: int, block_size: int, seed: int, stream: int = 0):
        """Order the windows of T = `block_size` of a split; each `stream` has another order."""
        assert n_tokens > block_size, (n_tokens, block_size)
        self._last_start = n_tokens - 1 - block_size
        self._block_size = block_size
        self._seeds = [seed, stream] if stream else [seed]
        # One window more than fits: the phase leaves a part at either end.
        self.per_epoch = math.ceil((n_tokens - 1) / block_size) + 1
        self.block_offsets = functools.lru_cache(maxsize=2)(self._block_offsets)

    def offset(self, number: int) -> int:
        """Return the first of the T+1 tokens of sample `number` (from 0). O(1)."""
        epoch, within = divmod(number, self.per_epoch)
        block, place = divmod(within, BLOCK)
        return int(self.block_offsets(epoch, block)[place])

    def _block_offsets(self, epoch: int, block: int) -> np.ndarray:
        """Return the offsets of one block of an epoch: int64, shape (at most BLOCK,)."""
        first, *stream = self._seeds
        drawn = np.random.SeedSequence([first, epoch, *stream])
        phase, seed = map(int, drawn.generate_state(2))
        if self.per_epoch <= FEW_WINDOWS:
            keys = drawn.generate_state(2 + self.per_epoch)[2:]
            windows = np.argsort(keys, kind="stable").astype(np.int64)
        else:
            indices = np.arange(block * BLOCK, min((block + 1) * BLOCK, self.per_epoch))
            windows = permute(indices, self.per_epoch, seed)
        starts = 1 + phase % self._block_size + (windows - 1) * self._block_size
        return starts.clip(0, self._last_start)


def permute(indices: np.ndarray, n: int, seed: int) -> np.ndarray:
    """Return where a permutation of 0..n-1 (n > 1) puts some indices: int64, of their shape.

    The Simon block cipher (https://eprint.iacr.org/2013/404) of at least 16 bits and `ROUNDS`
    rounds, applied again to what falls outside 0..n-1 (cycle walking).
    """
    half = max(-(-(n - 1).bit_length() // 2), 8)  # bits of half a block
    mask = (1 << half) - 1
    keys = [key & mask for key in _seed_sequence(seed, ROUNDS)]

    def rotate(x: np.ndarray, by: int) -> np.ndarray:
        return ((x << by) | (x >> (half - by))) & mask

    def mix(x: np.ndarray) -> np.ndarray:
        return (rotate(x, 1) & rotate(x, 8)) ^ rotate(x, 2)

    out = indices.astype(np.int64)
    outside = np.arange(out.size)
    while outside.size:
        left, right = out[outside] >> half, out[outside] & mask
        for first, second in zip(keys[::2], keys[1::2], strict=True):
            left = left ^ mix(right) ^ first
            right = right ^ mix(left) ^ second
        out[outside] = (left << half) | right
        outside = outside[out[outside] >= n]
    return out


def _seed_sequence(seed: int, n: int) -> list[int]:
    """Return n < 7 words of 32 bits as C++'s `std::seed_seq{seed}` generates them."""
    words, bits = [0x8B8B8B8B] * n, 0xFFFFFFFF
    near = (n - (n - 1) // 2) // 2
    far = near + (n - 1) // 2
    for k in range(2 * n):
        here, before, at_near, at_far = (i % n for i in (k, k - 1, k + near, k + far))
        if k < n:
            mixed = words[here] ^ words[at_near] ^ words[before]
            first = 1664525 * (mixed ^ mixed >> 27) & bits
            second = first + (1 if k == 0 else k + seed if k == 1 else k) & bits
            words[at_near] = words[at_near] + first & bits
            words[at_far] = words[at_far] + second & bits
        else:
            mixed = words[here] + words[at_near] + words[before] & bits
            first = 1566083941 * (mixed ^ mixed >> 27) & bits
            second = first - here & bits
            words[at_near] ^= first
            words[at_far] ^= second
        words[here] = second
    return words
