"""The events of a run: spikes, rewinds, skips, restarts, stragglers, corruption and damage."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxgpt.spikes.report import rows_text, skipped_ranges
from jaxgpt.train.reporting.goodput import goodput_records
from jaxgpt.train.reporting.stragglers import straggler_line


class Event(NamedTuple):
    """An event that spans steps `step` to `last`. Only spikes and rewinds have a `record`."""

    kind: str
    step: int
    last: int
    text: str
    record: dict[str, Any] = {}


def events(records: Mapping[str, Sequence[dict[str, Any]]]) -> list[Event]:
    """Return the events of a run, sorted by step.

    `records` maps each kind to a list of records, which may be empty.
    """
    out = []
    for r in records["spike"]:
        text = f"{r['cause']}, action {r['action']}, rows {rows_text(r['rows'])}"
        out.append(Event("spike", r["step"], r["step"], text, r))
    for r in records["rewind"]:
        text = "to step {}; steps {}-{} are dropped".format(r["step"], *r["dropped"])
        out.append(Event("rewind", r["spike"], r["spike"], text, r))
    for first, last in skipped_ranges(records["train"]):
        out.append(Event("skip", first, last, f"steps {first}-{last}"))
    # Start time -> last step before that start, newest start first.
    starts = {r.start: r.after for r in reversed(goodput_records(records["goodput"]))}
    texts = [("restart", after, f"after step {after}") for after in [*starts.values()][:-1]]
    texts += [("straggler", r["step"], straggler_line(r)) for r in records["straggler"]]
    for r in records["corruption"]:
        texts.append(("corruption", r["step"], f"at step {r['found']}: {', '.join(r['devices'])}"))
    texts += [("damage", r["step"], r["reason"]) for r in records["damage"]]
    out += [Event(kind, step, step, text) for kind, step, text in texts]
    return sorted(out, key=lambda event: event.step)
