from jaxgpt.spikes.skip import SkipRanges


def test_both_ends_are_skipped():
    skips = SkipRanges([(10, 20), (25, 30)])
    assert [s for s in range(1, 40) if s in skips] == [*range(10, 21), *range(25, 31)]


def test_ranges_of_several_starts_become_one_list():
    skips = SkipRanges([(25, 30), (10, 20), (15, 22), (10, 20), (23, 24)])
    assert skips.ranges == ((10, 30),)
    assert skips.flat() == (10, 30)
    assert str(SkipRanges([])) == "none"


def test_a_range_inside_another_does_not_shorten_it():
    skips = SkipRanges([(10, 30), (15, 20)])
    assert [s for s in range(1, 40) if s in skips] == [*range(10, 31)]
