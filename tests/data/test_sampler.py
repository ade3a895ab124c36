import time
from fractions import Fraction

import numpy as np
import pytest

from jaxgpt.data.interleave import Blend
from jaxgpt.data.sampler import DataOrder, EpochSampler, index_shuffle


def order_of(n_tokens, block_size, batch_size, seed):
    """The order of a single file."""
    windows = [EpochSampler(n_tokens, block_size, seed)]
    return DataOrder(Blend([Fraction(1)], [0]), windows, batch_size)


def starts(order, step, rows):
    return [place.start for place in order.places(step, rows)]


def epoch_starts(windows, epoch):
    first = epoch * windows.per_epoch
    return [windows.start(n) for n in range(first, first + windows.per_epoch)]


@pytest.mark.parametrize("n_tokens", [65, 66, 1000, 1025, 1089, 64 * 1100])
def test_every_token_is_seen_in_every_epoch(n_tokens):
    T = 64
    windows = EpochSampler(n_tokens, T, seed=3)
    for epoch in range(3):
        starts = epoch_starts(windows, epoch)
        assert min(starts) >= 0 and max(starts) + T + 1 <= n_tokens
        inputs = {t for s in starts for t in range(s, s + T)}
        targets = {t + 1 for t in inputs}
        assert inputs | targets == set(range(n_tokens))
        assert inputs == set(range(n_tokens - 1))


def test_epochs_and_seeds_differ_in_order_and_phase():
    T, n_tokens = 8, 4000
    orders = [EpochSampler(n_tokens, T, seed, stream) for seed in (1, 2) for stream in (0, 1)]
    epochs = [tuple(epoch_starts(o, e)) for o in orders for e in range(2)]
    assert len(set(epochs)) == 8
    phases = {s[len(s) // 2] % T for s in epochs}
    assert len(phases) > 1
    assert list(epochs[0]) != sorted(epochs[0])


def test_steps_cut_one_stream_of_windows():
    fine, coarse = order_of(5000, 16, 4, seed=5), order_of(5000, 16, 12, seed=5)
    walked = [s for step in range(1, 301) for s in starts(fine, step, range(4))]
    assert [s for step in range(1, 101) for s in starts(coarse, step, range(12))] == walked
    assert starts(coarse, 100, range(3, 7)) == walked[99 * 12 + 3 : 99 * 12 + 7]


def test_the_permutation_is_that_of_grains_datasets():
    import grain

    for n, seed in ((7, 0), (1000, 12345), (10_007, 2**32 - 1)):
        shuffled = grain.MapDataset.range(n).shuffle(seed=seed)
        own = [index_shuffle()(i, max_index=n - 1, seed=seed, rounds=4) for i in range(n)]
        assert own == list(shuffled)


def test_a_distant_step_costs_no_more_than_a_near_one():
    order = order_of(1_003_854, 64, 12, seed=1)
    starts(order, 1, range(12))  # imports what it needs
    began = time.perf_counter()
    far = starts(order, 1_000_000, range(12))
    assert time.perf_counter() - began < 0.05
    assert far != starts(order, 1, range(12))
    assert far == starts(order_of(1_003_854, 64, 12, seed=1), 1_000_000, range(12))


@pytest.mark.parametrize("n_windows", [30, 1000, 1100])
def test_rows_of_a_small_source_cost_no_more_than_reading_them(n_windows):
    # 30 million tokens in rows of 1024 are 29,000 rows; a permutation walked to the next of 30
    # windows takes 600 microseconds.
    windows = EpochSampler(64 * n_windows, 64, seed=9)
    began = time.process_time()
    for number in range(10**9, 10**9 + 1000):
        windows.start(number)
    assert time.process_time() - began < 1000 * 1e-4


def test_windows_are_drawn_evenly():
    # A permutation visits each window once; the two cut at the ends are the only ones to overlap.
    starts = np.array(epoch_starts(EpochSampler(64 * 100 + 1, 64, seed=9), 0))
    inner = starts[(starts > 0) & (starts < starts.max())]
    assert len(np.unique(inner)) == len(inner) >= 99
