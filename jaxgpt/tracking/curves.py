"""The curves of a run. Each number in a record has a tag, such as `train/loss`."""

from collections.abc import Iterator, Mapping
from typing import Any

# Maps each kind of record that trackers show as curves to the default group of its numbers.
GROUPS = {
    "train": "train",
    "eval": "eval",
    "spike": "spikes",
    "layers": "layers",
    "checkpoint": "goodput",
    "goodput": "goodput",
}
# KIND/FIELD -> tag, for each field whose tag is not GROUP/FIELD.
TAGS = {
    "train/dt": "throughput/dt",
    "train/tokens_per_sec": "throughput/tokens_per_sec",
    "train/tokens_per_sec_per_device": "throughput/tokens_per_sec_per_device",
    "train/samples_per_sec": "throughput/samples_per_sec",
    "train/tflops_per_device": "throughput/tflops_per_device",
    "train/mfu": "throughput/mfu",
    "train/slowest_over_mean": "throughput/slowest_over_mean",
    "train/slowest_rank": "throughput/slowest_rank",
    "train/seconds_left": "throughput/seconds_left",
    "train/memory_bytes": "memory/bytes",
    "train/memory_peak_bytes": "memory/peak_bytes",
    "train/data_wait": "data/wait",
    "train/consumed_tokens": "data/consumed_tokens",
    "train/corpora": "data",
    "train/skipped": "spikes/skipped",
    "train/skipped_steps": "spikes/skipped_steps",
    "train/nonfinite_steps": "spikes/nonfinite_steps",
    "eval/corpora": "eval",
    "checkpoint/stalled": "goodput/checkpoint_stalled",
    "checkpoint/seconds": "goodput/checkpoint_seconds",
}
NO_CURVES = ("kind", "step", "nonfinite")  # `nonfinite` is added by `json_line`


def curves(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers in a record, except its step, keyed by tags such as `train/loss`.

    `record` is a dict from `Record.to_dict` or from a line of metrics.jsonl. Numbers in lists are
    left out, and so is `skipped` if it is False. A goodput record yields only the fraction of time
    spent on each activity. The result is empty if the kind of the record is not in `GROUPS`.
    """
    kind = record["kind"]
    if kind not in GROUPS:
        return {}
    fields = {name: value for name, value in record.items() if name not in NO_CURVES}
    if kind == "goodput":
        total = sum(fields["seconds"].values()) or 1.0
        fields = {activity: seconds / total for activity, seconds in fields["seconds"].items()}
    out: dict[str, float] = {}
    for name, value in fields.items():
        if (name, value) != ("skipped", False):
            default = f"{GROUPS[kind]}/{name}"
            out |= _numbers(TAGS.get(f"{kind}/{name}", default), value)
    return out


def _numbers(tag: str, value: Any) -> Iterator[tuple[str, float]]:
    """Yield (tag, value) for a number, or for every number in a nested dict."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _numbers(f"{tag}/{name}", inner)
    elif isinstance(value, int | float):
        yield tag, value
