import numpy as np
import pytest

from jaxgpt.report.panels import MAX_POINTS, extremes, smoothed


@pytest.mark.parametrize("n", [1, 2999, 3001, 20_000, 123_457])
def test_downsampling_keeps_every_extreme_in_few_points(n):
    rng = np.random.default_rng(n)
    values = rng.normal(size=n).cumsum()
    peaks = rng.choice(n, size=min(n, 40), replace=False)
    values[peaks] += 1000 * rng.choice([-1, 1], size=len(peaks))
    kept = extremes(values, MAX_POINTS)
    assert len(kept) <= MAX_POINTS
    assert (np.diff(kept) > 0).all() and {0, n - 1} <= set(kept)
    for first in range(0, n, 500):  # the extremes of any stretch are near kept points
        part = values[first : first + 500]
        near = kept[(kept >= first - n / 500) & (kept < first + 500 + n / 500)]
        assert values[near].min() <= part.min() and values[near].max() >= part.max()


def test_gaps_stay_gaps():
    values = np.ones(10_000)
    values[2000:4000] = np.nan
    kept = extremes(values, 100)
    inside = kept[(kept > 2200) & (kept < 3800)]
    assert len(inside) and np.isnan(values[inside]).all()
    assert np.isnan(smoothed(values)[2000:4000]).all()


def test_smoothing_is_the_mean_of_the_finite_values_in_a_window():
    values = np.random.default_rng(0).normal(size=1000)
    values[[3, 500, 501]] = np.nan
    out = smoothed(values)
    for i in (0, 5, 499, 700, 999):
        assert out[i] == pytest.approx(np.nanmean(values[max(0, i - 10) : i + 11]))
    assert np.isnan(out[[3, 500, 501]]).all()
