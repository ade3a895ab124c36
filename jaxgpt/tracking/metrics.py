"""The figures of a training line: short name, legend, format and rank, in one table.

The numbers that a step computes on the device are described in `train/step_metrics.py`; one that
this table does not know is shown under its own name.
"""

import dataclasses
import datetime
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Figure:
    """A number of a training record, as the console shows it."""

    short: str
    legend: str
    show: Callable[[float], str]
    rank: int
    """What has to go first where a line is too long: the highest rank."""


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f}GiB"


def _seconds(seconds: float) -> str:
    return f"{1000 * seconds:.1f}ms" if seconds < 10 else f"{seconds:.2f}s"


def _clock(seconds: float) -> str:
    return str(datetime.timedelta(seconds=round(seconds)))


_COUNT, _SHARE = "{:,.0f}".format, "{:.1%}".format
_TABLE = (
    # name, short name, rank, format, legend
    ("loss", "loss", 0, "{:.4f}".format, "mean cross-entropy of the global batch, nats per token"),
    ("grad_norm", "gnorm", 3, "{:.3f}".format, "global norm of the gradient before clipping"),
    ("lr", "lr", 6, "{:.3g}".format, "learning rate"),
    ("dt", "dt", 1, _seconds, "time per step, without compilation, evaluation and checkpoints"),
    ("tokens_per_sec", "tps", 2, _COUNT, "tokens per second, whole job"),
    ("tokens_per_sec_per_device", "tps/dev", 8, _COUNT, "tokens per second and device"),
    ("samples_per_sec", "sps", 9, "{:.1f}".format, "samples (sequences) per second, whole job"),
    ("tflops_per_device", "tflops", 10, "{:.3g}".format, "TFLOP/s per device, by mfu's formula"),
    ("mfu", "mfu", 4, _SHARE, "share of the peak FLOP/s; not shown where that is unknown"),
    ("memory_bytes", "mem", 7, _gib, "memory in use: process 0's fullest device; on CPUs its RSS"),
    ("memory_peak_bytes", "peak", 11, _gib, "the most memory that was in use so far"),
    ("data_wait", "data", 12, _SHARE, "share of the step that process 0 spent waiting for data"),
    ("slowest_over_mean", "slow", 13, "{:.2f}".format,
     "slowest host over the mean: seconds per step not spent waiting for devices, and its rank"),
    ("skipped_steps", "skipped", 2, _COUNT, "steps skipped since this start, if any"),
    ("nonfinite_steps", "nonfinite", 2, _COUNT, "steps not finite since this start, if any"),
    ("seconds_left", "left", 5, _clock, "time left at the pace so far, evaluations included"),
)  # fmt: skip
FIGURES = {name: Figure(short, legend, show, rank) for name, short, rank, show, legend in _TABLE}
SILENT_AT_ZERO = ("skipped_steps", "nonfinite_steps")
UNSHOWN = ("step", "consumed_tokens", "skipped", "slowest_rank")  # or shown in another way


def figure(name: str, legends: Mapping[str, str]) -> Figure:
    """Return the figure of a number; `legends` are those that the step's own metrics bring."""
    known = FIGURES.get(name)
    if known is None:
        return Figure(name, legends.get(name, ""), "{:.4g}".format, 7)
    return dataclasses.replace(known, legend=legends.get(name, known.legend))


def shown_figures(values: Mapping[str, Any], legends: Mapping[str, str]) -> dict[str, Figure]:
    """Return the figures of a record's numbers, by name, in the table's order."""
    names = [name for name in FIGURES if name in values]
    names[3:3] = [name for name in values if name not in FIGURES and name not in UNSHOWN]
    return {
        name: figure(name, legends)
        for name in names
        if isinstance(values[name], int | float)
        and not (name in SILENT_AT_ZERO and values[name] == 0)
    }


def corpora_text(corpora: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the losses of corpora as `web=2.4527 code=1.9381`."""
    losses = ((name, found["loss"]) for name, found in corpora.items())
    return " ".join(f"{name}={loss:.4f}" for name, loss in losses if loss is not None)


def train_line(
    record: Mapping[str, Any],
    max_iters: int,
    width: int | None = None,
    legends: Mapping[str, str] | None = None,
) -> str:
    """Return a training record as `step=100/300 loss=2.4527 ...`.

    Args:
        record: `TrainRecord.to_dict()`.
        width: columns; the least important figures go until the line fits. None keeps all.
        legends: those of the step's own metrics.
    """
    start = f"step={record['step']}/{max_iters}"
    if record["skipped"]:
        return f"{start} skipped lr={record['lr']:.3g}"
    parts = {}
    for name, shown in shown_figures(record, legends or {}).items():
        parts[name] = shown.rank, f"{shown.short}={shown.show(record[name])}"
    if "slowest_over_mean" in parts:
        rank, text = parts["slowest_over_mean"]
        parts["slowest_over_mean"] = rank, f"{text}@{record['slowest_rank']}"
    if record.get("corpora"):
        parts["corpora"] = 6, corpora_text(record["corpora"])
    while width and parts and len(_joined(start, parts)) > width:
        del parts[max(parts, key=lambda name: parts[name][0])]
    return _joined(start, parts)


def _joined(start: str, parts: Mapping[str, tuple[int, str]]) -> str:
    return " ".join([start, *(text for _, text in parts.values())])
