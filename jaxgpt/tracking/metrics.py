"""The figures of a training line: short name, rank, format and legend, in one table.

A number of `train/reporting/step_metrics.py` that is not in it is shown under its own name."""

import datetime
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Figure(NamedTuple):
    """A number of a training record, as the console shows it."""

    short: str
    rank: int  # what goes first where a line is too long: the highest rank
    show: Callable[[float], str]
    legend: str


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f}GiB"


def _seconds(seconds: float) -> str:
    return f"{1000 * seconds:.1f}ms" if seconds < 10 else f"{seconds:.2f}s"


def _clock(seconds: float) -> str:
    return str(datetime.timedelta(seconds=round(seconds)))


_COUNT, _SHARE = "{:,.0f}".format, "{:.1%}".format
FIGURES = {
    "loss": Figure("loss", 0, "{:.4f}".format, "mean cross-entropy, nats per token"),
    "grad_norm": Figure("gnorm", 3, "{:.3f}".format, "global norm of the unclipped gradient"),
    "lr": Figure("lr", 6, "{:.3g}".format, "learning rate"),
    "dt": Figure("dt", 1, _seconds, "time per step, without compilation, evaluation, checkpoints"),
    "tokens_per_sec": Figure("tps", 2, _COUNT, "tokens per second, whole job"),
    "tokens_per_sec_per_device": Figure("tps/dev", 8, _COUNT, "tokens per second and device"),
    "samples_per_sec": Figure("sps", 9, "{:.1f}".format, "sequences per second, whole job"),
    "tflops_per_device": Figure("tflops", 10, "{:.3g}".format, "TFLOP/s per device, as for mfu"),
    "mfu": Figure("mfu", 4, _SHARE, "share of the peak FLOP/s; not shown where that is unknown"),
    "memory_bytes": Figure("mem", 7, _gib, "memory of process 0's fullest device; on CPUs its RSS"),
    "memory_peak_bytes": Figure("peak", 11, _gib, "the most memory that was in use so far"),
    "data_wait": Figure("data", 12, _SHARE, "share of the step that process 0 waited for data"),
    "slowest_over_mean": Figure(
        "slow", 13, "{:.2f}".format, "a process's own time: slowest over the mean, and its rank"
    ),
    "skipped_steps": Figure("skipped", 2, _COUNT, "steps skipped since this start, if any"),
    "nonfinite_steps": Figure("nonfinite", 2, _COUNT, "steps not finite since this start, if any"),
    "seconds_left": Figure("left", 5, _clock, "time left at the pace so far"),
}
_SILENT_AT_ZERO = ("skipped_steps", "nonfinite_steps")
_UNSHOWN = ("step", "consumed_tokens", "skipped", "slowest_rank")  # or shown in another way


def figure(name: str, legends: Mapping[str, str]) -> Figure:
    """Return the figure of a number; `legends` are those that the step's own metrics bring."""
    shown = FIGURES.get(name) or Figure(name, 7, "{:.4g}".format, "")
    return shown._replace(legend=legends.get(name, shown.legend))


def train_line(record: Mapping[str, Any], max_iters: int, width: int | None = None) -> str:
    """Return `TrainRecord.to_dict()` as `step=100/300 loss=2.4527 ...`.

    The least important figures go until the line fits into `width` columns; None keeps all.
    """
    start = f"step={record['step']}/{max_iters}"
    if record["skipped"]:
        return f"{start} skipped lr={record['lr']:.3g}"
    names = [name for name in FIGURES if name in record]
    names[3:3] = [name for name in record if name not in FIGURES and name not in _UNSHOWN]
    parts = [(-1, start)]
    for name in names:
        value, shown = record[name], figure(name, {})
        if isinstance(value, int | float) and not (name in _SILENT_AT_ZERO and value == 0):
            rank = f"@{record['slowest_rank']}" if name == "slowest_over_mean" else ""
            parts.append((shown.rank, f"{shown.short}={shown.show(value)}{rank}"))
    if record.get("corpora"):
        losses = {name: found["loss"] for name, found in record["corpora"].items()}
        text = " ".join(f"{name}={loss:.4f}" for name, loss in losses.items() if loss is not None)
        parts.append((6, text))
    while width and len(parts) > 1 and len(" ".join(text for _, text in parts)) > width:
        parts.remove(max(parts, key=lambda part: part[0]))
    return " ".join(text for _, text in parts)
