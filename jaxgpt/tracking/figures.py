"""The training line, and the format of each number in the line."""

import datetime
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Figure(NamedTuple):
    """The legend and the format of one number in a training record."""

    legend: str
    short: str = ""  # name on the console; by default, the name in the record
    rank: int = 7  # if a line is too long, the numbers with the highest rank are dropped first
    show: Callable[[float], str] = "{:.4g}".format


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f}GiB"


def _seconds(seconds: float) -> str:
    return f"{1000 * seconds:.1f}ms" if seconds < 10 else f"{seconds:.2f}s"


def _clock(seconds: float) -> str:
    return str(datetime.timedelta(seconds=round(seconds)))


_COUNT, _SHARE = "{:,.0f}".format, "{:.1%}".format
# Metrics that the host measures between steps. `STEP_METRICS` in train/step.py has the metrics that
# the devices compute.
HOST_FIGURES = {
    "dt": Figure("time per step, without compilation, evaluation and checkpoints", "", 1, _seconds),
    "tokens_per_sec": Figure("tokens per second, whole job", "tps", 2, _COUNT),
    "tokens_per_sec_per_device": Figure("tokens per second per device", "tps/dev", 8, _COUNT),
    "samples_per_sec": Figure("sequences per second, whole job", "sps", 9, "{:.1f}".format),
    "tflops_per_device": Figure("TFLOP/s per device, as in mfu", "tflops", 10, "{:.3g}".format),
    "mfu": Figure("fraction of peak FLOP/s; not shown if the peak is unknown", "", 4, _SHARE),
    "memory_bytes": Figure("memory of process 0's fullest device; RSS on CPUs", "mem", 7, _gib),
    "memory_peak_bytes": Figure("highest mem so far", "peak", 11, _gib),
    "data_wait": Figure("fraction of a step that process 0 waits for data", "data", 12, _SHARE),
    "slowest_over_mean": Figure(
        "host time of the slowest process / mean host time, @rank", "slow", 13, "{:.2f}".format
    ),
    "skipped_steps": Figure("steps skipped since start-up, if any", "skipped", 2, _COUNT),
    "nonfinite_steps": Figure("non-finite steps since start-up, if any", "nonfinite", 2, _COUNT),
    "seconds_left": Figure("time left at the average speed so far", "left", 5, _clock),
}
_SILENT_AT_ZERO = ("skipped_steps", "nonfinite_steps")


def train_line(
    record: Mapping[str, Any],
    figures: Mapping[str, Figure],
    max_iters: int,
    width: int | None = None,
) -> str:
    """Return `TrainRecord.to_dict()` as text: `step=100/300 loss=2.4527 ...`.

    The line of a skipped step has only its learning rate. Unknown numbers and zero counts of
    skipped and non-finite steps are left out. If `width` is given, the numbers with the highest
    rank are dropped until the line fits into `width` columns, or only the step is left.
    """
    start = f"step={record['step']}/{max_iters}"
    if record["skipped"]:
        return f"{start} skipped lr={figures['lr'].show(record['lr'])}"
    parts = [(-1, start)]
    for name, figure in figures.items():
        value = record.get(name)
        if value is not None and not (name in _SILENT_AT_ZERO and value == 0):
            process = f"@{record['slowest_rank']}" if name == "slowest_over_mean" else ""
            parts.append((figure.rank, f"{figure.short or name}={figure.show(value)}{process}"))
    if record.get("corpora"):
        losses = {name: found["loss"] for name, found in record["corpora"].items()}
        text = " ".join(f"{name}={loss:.4f}" for name, loss in losses.items() if loss is not None)
        parts.append((6, text))
    while width and len(parts) > 1 and len(" ".join(text for _, text in parts)) > width:
        parts.remove(max(parts, key=lambda part: part[0]))
    return " ".join(text for _, text in parts)


def legend(
    record: Mapping[str, Any], figures: Mapping[str, Figure], with_slowest: bool
) -> dict[str, str]:
    """Return the meaning of each number in a run's training lines, keyed by its console name.

    `record` is one of the run's records, and `with_slowest` includes the slowest process.
    """
    out = {"step": "optimizer step (from 1) / last step"}
    for name, figure in figures.items():
        if name != "slowest_over_mean" or with_slowest:
            out[figure.short or name] = figure.legend
    if record.get("corpora"):
        out |= {name: "mean loss on this corpus since the last line" for name in record["corpora"]}
    return out
