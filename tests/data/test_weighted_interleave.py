import random
from fractions import Fraction

import pytest

from jaxgpt.data.blend import MIN_BLOCK, Blend, WeightedInterleave

WEIGHTS = {
    "five": ["0.5", "0.25", "0.15", "0.07", "0.03"],
    "one heavy": ["0.95", "0.01", "0.01", "0.02", "0.01"],
    "two heavy, two light": ["0.4999", "0.4998", "0.0001", "0.0002"],
    "equal": ["1"] * 7,
    "as measured": ["0.0018520780893211373", "0.30179284", "0.1", "0.59635508", "1e-4"],
    "twenty": [repr(random.Random(1).random() ** (1 + i % 5)) for i in range(20)],
    "a hundred": [repr(random.Random(i).random() ** 2 + 1e-2) for i in range(100)],
}


@pytest.mark.parametrize("far", [0, 10**12 + 12345])
@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=list(WEIGHTS))
def test_counts_are_within_one_of_the_shares_after_every_sample(weights, far):
    shares = [Fraction(w) for w in weights]
    total = sum(shares)
    mix = WeightedInterleave(shares)
    counts = mix.counts(far)
    for n in range(far, far + 3 * MIN_BLOCK):
        corpus, number = mix[n]
        assert number == counts[corpus]  # no sample of a corpus is left out or drawn twice
        counts[corpus] += 1
        assert abs(counts[corpus] * total - (n + 1) * shares[corpus]) <= total
        if n % 97 == 0:  # those that were not drawn fall behind
            for count, share in zip(counts, shares, strict=True):
                assert abs(count * total - (n + 1) * share) <= total
    assert counts == mix.counts(n + 1)


def test_an_order_is_the_same_from_wherever_it_is_entered():
    weights = [Fraction(w) for w in WEIGHTS["as measured"]]
    mix = WeightedInterleave(weights)
    end = 3 * mix.block
    walked = [mix[n] for n in range(end)]
    entered = WeightedInterleave(weights)
    places = [*range(end - 1, 0, -997), *range(5, end, 1009)]
    assert [entered[n] for n in places] == [walked[n] for n in places]


def test_sources_share_the_samples_of_their_corpus():
    # Corpus 0 has sources 0 and 2 of weights 1 and 2, corpus 1 source 1 of weight 3.
    blend = Blend([Fraction(1), Fraction(3), Fraction(2)], [0, 1, 0])
    drawn = [blend[n] for n in range(6000)]
    per_source = [[number for _, s, number in drawn if s == source] for source in range(3)]
    assert all(numbers == list(range(len(numbers))) for numbers in per_source)
    assert [len(numbers) for numbers in per_source] == pytest.approx([1000, 3000, 2000], abs=2)
    assert all(corpus == (source == 1) for corpus, source, _ in drawn)
    assert blend.counts(6000) == pytest.approx([3000, 3000], abs=1)


def test_a_distant_sample_makes_no_more_blocks_than_a_near_one():
    weights = [Fraction(w) for w in WEIGHTS["five"]]
    for n in (0, 7, 10**9 * 512, 10**15 + 1):
        interleave = WeightedInterleave(weights)
        interleave[n]
        assert interleave.make_block.cache_info().misses <= 2
    interleave = WeightedInterleave(weights)
    for n in range(3 * interleave.block):
        interleave[n]
    assert interleave.make_block.cache_info().misses <= 4
