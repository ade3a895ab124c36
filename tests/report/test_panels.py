import json

import numpy as np
import pytest

from jaxgpt.report.panels import MAX_POINTS, PANELS, extremes, series_of, smoothed
from jaxgpt.tracking.run_files import read_runs


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


def test_rewinds_stay_apart_in_a_long_run(tmp_path):
    """Each of two rewinds drops 2,000 steps; there is nothing between them to plot."""
    rewinds = [
        {"kind": "rewind", "step": to, "spike": to + 2000, "cause": "loss", "loss": 9.0,
         "grad_norm": 1.0, "rows": [], "skip": [to + 1999, to + 2001],
         "dropped": [to + 1, to + 2000],
         "dropped_losses": [[step, 3.0] for step in range(to + 1, to + 2001)]}
        for to in (1000, 5000)
    ]  # fmt: skip
    steps = [{"kind": "train", "step": s, "loss": 3.0, "skipped": False} for s in (1000, 5000)]
    records = [steps[0], rewinds[0], steps[1], rewinds[1]]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    (run,) = read_runs([tmp_path])
    curves, _ = series_of(run, PANELS[0], limit=100)
    dropped = next(curve for curve in curves if curve.style == "dropped")
    at, losses = dropped.columns["steps"], dropped.columns["y"]
    last = np.flatnonzero(np.isfinite(losses) & (at <= 3000)).max()  # point of the first rewind
    assert np.isnan(losses[last + 1]) and len(at) < 110
