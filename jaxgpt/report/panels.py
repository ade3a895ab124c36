"""The panels of a report as plain data, and the downsampling of curves."""

from typing import Any, NamedTuple

import numpy as np

from jaxgpt.perf.units import GIB
from jaxgpt.report.events import events
from jaxgpt.tracking.run_files import RunFiles

MAX_POINTS = 3000  # per curve
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a6d3b", "#5d3fd3")
MARKS = {  # kind -> color, Bokeh marker, matplotlib marker, meaning
    "spike": ("#d62728", "triangle", "^", "spike"),
    "rewind": ("#9467bd", "inverted_triangle", "v", "rewind"),
    "skip": ("#7f7f7f", "dash", "_", "skipped steps"),
    "restart": ("#1f77b4", "diamond", "D", "restart"),
    "straggler": ("#bc8f00", "square", "s", "straggler"),
    "corruption": ("#e377c2", "x", "x", "corrupted device"),
    "damage": ("#8c564b", "cross", "+", "damaged checkpoint"),
}
RECORD_STYLES = {"train": "line", "eval": "points", "rewind": "dropped"}  # by kind of record


class Panel(NamedTuple):  # a plot of metrics against steps
    title: str
    unit: str
    curves: tuple[tuple[str, str, str], ...]  # kind of record, name in the record, label
    scale: float = 1.0
    is_noisy: bool = False  # draw a smoothed line on top of the raw one
    has_log: bool = False  # offer a logarithmic y-axis


PANELS = (
    Panel("Loss", "nats per token", (
        ("train", "loss", "training"), ("eval", "val_loss", "evaluation, validation split"),
        ("eval", "train_loss", "evaluation, training split"),
        ("rewind", "loss", "dropped by rewinds")), is_noisy=True, has_log=True),
    Panel("Gradient norm", "", (("train", "grad_norm", "gradient norm"),), 1, True, True),
    Panel("Learning rate", "", (("train", "lr", "learning rate"),)),
    Panel("Throughput", "thousand tokens/s", (
        ("train", "tokens_per_sec", "all devices"),), 1e-3, True),
    Panel("MFU", "% of peak FLOP/s", (("train", "mfu", "MFU"),), 100, True),
    Panel("Memory", "GiB, fullest device", (
        ("train", "memory_bytes", "in use"), ("train", "memory_peak_bytes", "peak")), 1 / GIB),
)  # fmt: skip


class Series(NamedTuple):  # a curve in a panel; a noisy curve has two series, raw and smooth
    number: int  # index of the curve in `Panel.curves`
    style: str  # raw, smooth, line, points or dropped
    label: str
    columns: dict[str, np.ndarray]  # int32 `steps`, float32 `tokens` and `y`


def series_of(
    run: RunFiles, panel: Panel, limit: int = MAX_POINTS
) -> tuple[list[Series], dict[str, Any]]:
    """Return one run's curves in a panel, and the marks for the run's events.

    The list has the same length for all runs. Each curve has at most `limit` points (and the gaps
    between rewinds), or none if it has no finite values. `limit` must be at least 2.

    The marks are columns with one value per event: int32 `steps`, float32 `tokens` and `y`, float64
    `steps_end` and `tokens_end`, and lists `kind`, `text`, `color` and `marker`.
    """
    out = []
    for number, (kind, key, label) in enumerate(panel.curves):
        steps, values = run.dropped_losses() if kind == "rewind" else run.curve(kind, key)
        values = panel.scale * values if np.isfinite(values).any() else values[:0]
        is_noisy = panel.is_noisy and kind == "train"
        lines = [("raw" if is_noisy else RECORD_STYLES[kind], values, limit)]
        lines += [("smooth", smoothed(values), limit // 4)] if is_noisy else []
        for style, line, most in lines:
            kept = extremes(line, most)
            if style == "dropped":  # keep the gaps between rewinds
                kept = np.union1d(kept, np.flatnonzero(np.isnan(line)))
            out.append(Series(number, style, label, _columns(run, steps[kept], line[kept])))
    # The first curve gives the heights of events without values of their own.
    curve = next(series.columns for series in out if series.style != "raw")
    marks, key = events(run.records), panel.curves[0][1]
    steps, finite = np.array([mark.step for mark in marks], float), np.isfinite(curve["y"])
    points = (curve["steps"][finite], curve["y"][finite]) if finite.any() else ([0], [np.nan])
    own = [mark.record.get(key) for mark in marks]  # values in the events' records, if any
    heights = np.where([y is None for y in own], np.interp(steps, *points), np.array(own, float))
    ends = np.array([mark.last for mark in marks], float)
    looks = {"kind": [mark.kind for mark in marks], "text": [mark.text[:300] for mark in marks]}
    looks |= {"color": [MARKS[mark.kind][0] for mark in marks]}
    looks |= {"marker": [MARKS[mark.kind][1] for mark in marks]}
    looks |= {"steps_end": ends, "tokens_end": run.tokens_at(ends)}
    return out, _columns(run, steps, heights) | looks


def _columns(run: RunFiles, steps: np.ndarray, values: np.ndarray) -> dict[str, np.ndarray]:
    tokens = run.tokens_at(steps).astype("float32")
    return {"steps": steps.astype("int32"), "tokens": tokens, "y": values.astype("float32")}


def smoothed(values: np.ndarray) -> np.ndarray:
    """Return the centered moving mean of `values` over about 2% of the curve, at least one value.

    `values` and the result have shape (N,). Non-finite values are left out of the means, and the
    result is NaN at their positions.
    """
    if not len(values):
        return values
    window, finite = np.ones(2 * (len(values) // 100) + 1), np.isfinite(values)
    total = np.convolve(np.where(finite, values, 0.0), window, "same")
    n_finite = np.convolve(finite.astype(float), window, "same")
    return np.where(finite, total / np.maximum(n_finite, 1), np.nan)


def extremes(values: np.ndarray, limit: int) -> np.ndarray:
    """Return the indices of at most `limit` values: the first, the last, and local extremes.

    The indices (int64) are increasing. If there are at most `limit` values, all are kept.
    Otherwise, `values` (N,) is split into (limit - 2) // 2 nearly equal parts, and the minimum and
    maximum of each part are kept. `limit` must be at least 2.
    """
    if (n := len(values)) <= limit:
        return np.arange(n)
    edges = np.linspace(0, n, (limit - 2) // 2 + 1).astype(int)
    low, high = np.nan_to_num(values, nan=np.inf), np.nan_to_num(values, nan=-np.inf)
    kept = {0, n - 1}
    for first, end in zip(edges, edges[1:], strict=False):
        kept |= {first + int(low[first:end].argmin()), first + int(high[first:end].argmax())}
    return np.array(sorted(kept))
