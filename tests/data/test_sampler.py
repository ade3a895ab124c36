import numpy as np
import pytest

from jaxgpt.data.sampler import BLOCK, EpochSampler, permute


def epoch_starts(windows, epoch):
    first = epoch * windows.per_epoch
    return [windows.offset(n) for n in range(first, first + windows.per_epoch)]


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


@pytest.mark.parametrize("n", [1025, 10_007, 65_536, 131_073, 3_000_000])
def test_the_permutation_is_that_of_grains_datasets(n):
    import grain

    for seed in (0, 12345, 2**32 - 1):
        shuffled = grain.MapDataset.range(n).shuffle(seed=seed)
        indices = np.unique(np.linspace(0, n - 1, 300).astype(np.int64))
        assert permute(indices, n, seed).tolist() == [shuffled[int(i)] for i in indices]


@pytest.mark.parametrize("n", [2, 1025, 4**8 + 1, 70_000])
def test_every_window_is_visited_once(n):
    # Of 4^8 + 1 windows Grain's own permutation visits one twice and one never.
    assert (np.sort(permute(np.arange(n), n, seed=3)) == np.arange(n)).all()


@pytest.mark.parametrize("n_windows", [30, 1000, 1100, 300_000])
def test_a_distant_sample_permutes_one_block_as_a_near_one_does(n_windows):
    near, far = (EpochSampler(64 * n_windows, 64, seed=9) for _ in range(2))
    near.offset(0)
    far.offset(10**15)
    assert near.block_offsets.cache_info().misses == far.block_offsets.cache_info().misses == 1
    assert len(far.block_offsets(*divmod(0, BLOCK))) <= BLOCK


def test_samples_in_turn_permute_each_block_once():
    sampler = EpochSampler(64 * 5000, 64, seed=9)
    for number in range(3 * sampler.per_epoch):
        sampler.offset(number)
    assert sampler.block_offsets.cache_info().misses == 3 * -(-sampler.per_epoch // BLOCK)


def test_windows_are_drawn_evenly():
    # A permutation visits each window once; the two cut at the ends are the only ones to overlap.
    starts = np.array(epoch_starts(EpochSampler(64 * 100 + 1, 64, seed=9), 0))
    inner = starts[(starts > 0) & (starts < starts.max())]
    assert len(np.unique(inner)) == len(inner) >= 99
