"""Log lines that report training metrics, and the format of each metric."""

import datetime
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple


class MetricFormat(NamedTuple):
    """Legend and display format of one metric in the training lines."""

    legend: str
    short: str = ""  # name on the console; by default, the name in the record
    rank: int = 7  # metrics with the highest rank are dropped first if a line is too long
    show: Callable[[float], str] = "{:.4g}".format
    width: int = 7  # usual width of a value, in characters


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f}GiB"


def _seconds(seconds: float) -> str:
    return f"{1000 * seconds:.1f}ms" if seconds < 10 else f"{seconds:.2f}s"


def clock_text(seconds: float) -> str:
    """Return a duration in whole seconds as text such as `1:01:01` or `2 days, 1:01:01`.

    `seconds` must be from 0 to 8e13.
    """
    return str(datetime.timedelta(seconds=round(seconds)))


def _per_second(value: float) -> str:
    return f"{value:.1f}" if value >= 1 else f"{value:.2g}"


_COUNT, _SHARE, _LOSS = "{:,.0f}".format, "{:.1%}".format, "{:.4f}".format
# Metrics that the host measures. The devices compute the metrics in `STEP_METRICS` (train/step.py).
HOST_METRICS = {
    "dt": MetricFormat(
        "time per step, without compilation, evaluation and checkpoints", "", 1, _seconds
    ),
    "tokens_per_sec": MetricFormat("tokens per second, whole job", "tps", 2, _COUNT),
    "tokens_per_sec_per_device": MetricFormat("tokens per second per device", "tps/dev", 8, _COUNT),
    "samples_per_sec": MetricFormat("sequences per second, whole job", "sps", 9, _per_second),
    "tflops_per_device": MetricFormat(
        "TFLOP/s per device, as in mfu", "tflops", 10, "{:.3g}".format
    ),
    "mfu": MetricFormat("fraction of peak FLOP/s; not shown if the peak is unknown", "", 4, _SHARE),
    "memory_bytes": MetricFormat(
        "memory of this process's fullest device; RSS on CPUs", "mem", 7, _gib
    ),
    "memory_peak_bytes": MetricFormat("highest mem so far", "peak", 11, _gib),
    "data_wait": MetricFormat(
        "fraction of a step that this process waits for data", "data", 12, _SHARE
    ),
    "slowest_over_mean": MetricFormat(
        "host time of the slowest process / mean host time, @rank", "slow", 13, "{:.2f}".format
    ),
    "skipped_steps": MetricFormat("steps skipped since start-up, if any", "skipped", 2, _COUNT),
    "nonfinite_steps": MetricFormat(
        "non-finite steps since start-up, if any", "nonfinite", 2, _COUNT
    ),
    "seconds_left": MetricFormat("time left at the average speed so far", "left", 5, clock_text),
    "consumed_tokens": MetricFormat(
        "tokens consumed so far, including skipped ones", "tokens", 14, _COUNT
    ),
    "train_loss": MetricFormat("loss on the training split in the last evaluation", "", 8, _LOSS),
    "val_loss": MetricFormat("loss on the validation split in the last evaluation", "", 8, _LOSS),
}
_SILENT_AT_ZERO = ("skipped_steps", "nonfinite_steps")


def train_line(
    record: Mapping[str, Any],
    metrics: Mapping[str, MetricFormat],
    max_iters: int,
    width: int | None = None,
) -> str:
    """Return `TrainRecord.to_dict()` as text: `step=100/300 loss=2.4527 ...`.

    The text has the metrics in `metrics`, and the mean loss of each corpus. Missing values are left
    out, and so are `skipped_steps` and `nonfinite_steps` if they are 0. If `width` is given, the
    metrics with the highest ranks are dropped until the line fits in `width` columns. Unless the
    step was skipped, this assumes that all values have at least their usual widths, so that the
    lines of all steps have the same metrics. The step, the skipped range and metrics with a
    negative rank are never dropped.
    """
    if not record["skipped"]:
        metrics = _usually_shown(metrics, max_iters, width)
    parts = [(-1, f"step={record['step']}/{max_iters}")]
    if record["skipped"]:
        first, last = record["skipped_range"]
        parts.append((-1, f"skipped range={first}-{last}"))
    for name, metric in metrics.items():
        value = record.get(name)
        if value is not None and not (name in _SILENT_AT_ZERO and value == 0):
            process = f"@{record['slowest_rank']}" if name == "slowest_over_mean" else ""
            parts.append((metric.rank, f"{metric.short or name}={metric.show(value)}{process}"))
    if record.get("corpora"):
        losses = {name: found["loss"] for name, found in record["corpora"].items()}
        text = " ".join(f"{name}={loss:.4f}" for name, loss in losses.items() if loss is not None)
        parts.append((6, text))
    return " ".join(_fitting(parts, width))


def legend(
    metrics: Mapping[str, MetricFormat],
    max_iters: int,
    corpora: Sequence[str] = (),
    width: int | None = None,
) -> list[str]:
    """Return the legend of the training lines: a line for the step, every metric and every corpus.

    `corpora` has the names of the corpora, and is empty if there is only one corpus. If `width` is
    given, the legend omits the corpora, `skipped_steps`, `nonfinite_steps` and any metrics that
    training lines of that width usually omit.
    """
    out = {"step": "optimizer step (from 1) / last step"}
    for name, metric in _usually_shown(metrics, max_iters, width).items():
        if not (width and name in _SILENT_AT_ZERO):
            out[metric.short or name] = metric.legend
    if not width:
        out |= dict.fromkeys(corpora, "mean loss on this corpus since the last line")
    longest = max(map(len, out))
    return [f"  {name:{longest}}  {meaning}" for name, meaning in out.items()]


def _usually_shown(
    metrics: Mapping[str, MetricFormat], max_iters: int, width: int | None
) -> dict[str, MetricFormat]:
    """Return the metrics that fit in `width` columns if all values have their usual widths.

    Counts that are usually 0 take no space.
    """
    if width is None:
        return dict(metrics)
    left, shown = width - len(f"step={max_iters}/{max_iters}"), set()
    for name, metric in sorted(metrics.items(), key=lambda item: item[1].rank):
        if name not in _SILENT_AT_ZERO:
            left -= len(f" {metric.short or name}=") + metric.width
        if left < 0 <= metric.rank:
            break
        shown.add(name)
    return {name: metric for name, metric in metrics.items() if name in shown}


def _fitting(parts: Sequence[tuple[int, str]], width: int | None) -> list[str]:
    """Return the text of each (rank, text) part, dropping the highest ranks to fit `width`."""
    kept = list(parts)
    droppable = sorted((part for part in parts if part[0] >= 0), key=lambda part: part[0])
    while width and droppable and len(" ".join(text for _, text in kept)) > width:
        kept.remove(droppable.pop())
    return [text for _, text in kept]
