import time

import numpy as np
import pytest

from jaxgpt.data.order import DataOrder, index_shuffle


def epoch_starts(order, batch_size, epoch):
    """Starts of one epoch of an order whose epochs are whole steps."""
    steps = order.windows_per_epoch // batch_size
    first = epoch * steps + 1
    return [
        s for step in range(first, first + steps) for s in order.starts(step, range(batch_size))
    ]


@pytest.mark.parametrize("n_tokens", [65, 66, 1000, 1025, 1089])
def test_every_token_is_seen_in_every_epoch(n_tokens):
    T = 64
    order = DataOrder(n_tokens, T, 1, seed=3)
    for epoch in range(3):
        starts = epoch_starts(order, 1, epoch)
        assert min(starts) >= 0 and max(starts) + T + 1 <= n_tokens
        inputs = {t for s in starts for t in range(s, s + T)}
        targets = {t + 1 for t in inputs}
        assert inputs | targets == set(range(n_tokens))
        assert inputs == set(range(n_tokens - 1))


def test_epochs_and_seeds_differ_in_order_and_phase():
    T, n_tokens = 8, 4000
    orders = [DataOrder(n_tokens, T, 1, seed) for seed in (1, 2)]
    epochs = [tuple(epoch_starts(o, 1, e)) for o in orders for e in range(2)]
    assert len(set(epochs)) == 4
    phases = {s[len(s) // 2] % T for s in epochs}
    assert len(phases) > 1
    assert list(epochs[0]) != sorted(epochs[0])


def test_steps_cut_one_stream_of_windows():
    fine, coarse = DataOrder(5000, 16, 4, seed=5), DataOrder(5000, 16, 12, seed=5)
    walked = [s for step in range(1, 301) for s in fine.starts(step, range(4))]
    assert [s for step in range(1, 101) for s in coarse.starts(step, range(12))] == walked
    assert coarse.starts(100, range(3, 7)) == walked[99 * 12 + 3 : 99 * 12 + 7]


def test_the_permutation_is_that_of_grains_datasets():
    import grain

    for n, seed in ((7, 0), (1000, 12345), (10_007, 2**32 - 1)):
        shuffled = grain.MapDataset.range(n).shuffle(seed=seed)
        own = [index_shuffle()(i, max_index=n - 1, seed=seed, rounds=4) for i in range(n)]
        assert own == list(shuffled)


def test_a_distant_step_costs_no_more_than_a_near_one():
    order = DataOrder(1_003_854, 64, 12, seed=1)
    order.starts(1, range(12))  # imports what it needs
    began = time.perf_counter()
    far = order.starts(1_000_000, range(12))
    assert time.perf_counter() - began < 0.05
    assert far != order.starts(1, range(12))
    assert far == DataOrder(1_003_854, 64, 12, seed=1).starts(1_000_000, range(12))


def test_windows_are_drawn_evenly():
    # A permutation visits each window once; the two cut at the ends are the only ones to overlap.
    order = DataOrder(64 * 100 + 1, 64, 1, seed=9)
    starts = np.array(epoch_starts(order, 1, 0))
    inner = starts[(starts > 0) & (starts < starts.max())]
    assert len(np.unique(inner)) == len(inner) >= 99
