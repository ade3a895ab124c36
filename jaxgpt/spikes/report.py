"""Console lines and a table for a run's spikes, skips and rewinds."""

from collections.abc import Iterator
from typing import Any

from jaxgpt.spikes.skip import SkipRanges
from jaxgpt.tracking.console import table_text

SHOWN_ROWS = 2
LOG_WIDTH = 160  # width of the table in columns if there is no terminal


def spike_line(record: dict[str, Any]) -> str:
    """Return the console line about a spike, given its `SpikeRecord.to_dict()`."""
    text = (
        f"step={record['step']} spike ({record['cause']}): loss={record['loss']:.4f} "
        f"gnorm={record['grad_norm']:.3f}"
    )
    if "limit" in record:
        text += f" limit={record['limit']:.4g} median={record['median']:.4g}"
    return f"{text} action={record['action']} rows {rows_text(record['rows'])}"


def rewind_line(rewind: dict[str, Any]) -> str:
    """Return the console line about a rewind, given in the format of `read_rewinds`."""
    (first, last), (from_, to) = rewind["dropped"], rewind["skip"]
    return (
        f"rewound to step {rewind['to']} because of the spike at step {rewind['spike']}: steps "
        f"{first}-{last} are dropped, and the batches of steps {from_}-{to} will be skipped"
    )


def rows_text(rows: list[dict[str, Any]]) -> str:
    """Return the indices, corpora and offsets of the first `SHOWN_ROWS` rows as text.

    `rows` has the format of `worst_rows`. If there are more rows, the text ends with `...`.
    """
    shown = [f"{r['row']} ({r['corpus']} @{r['offset']})" for r in rows[:SHOWN_ROWS]]
    return ", ".join(shown) + (", ..." if len(rows) > SHOWN_ROWS else "")


def skipped_ranges(records: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """Return the ranges of skipped steps in a run's records, as inclusive (first, last) pairs."""
    steps = [r["step"] for r in records if r["kind"] == "train" and r["skipped"]]
    return list(SkipRanges((step, step) for step in steps).ranges)


def spikes_table(records: list[dict[str, Any]], width: int = LOG_WIDTH) -> str:
    """Return a table of the spikes, skips and rewinds in a run's records, sorted by step.

    Lines have at most `width` characters. If there are no such events, return `no spikes, skips
    or rewinds`.
    """
    rows = sorted(_rows(records), key=lambda row: row[0])
    if not rows:
        return "no spikes, skips or rewinds"
    headings = ("step", "event", "loss", "grad norm", "what was done", "worst rows")
    cells = ((str(step), *rest) for step, *rest in rows)
    return table_text(headings, cells, width, title="Spikes, skips and rewinds")


def _rows(records: list[dict[str, Any]]) -> Iterator[tuple[Any, ...]]:
    for r in records:
        if r["kind"] not in ("spike", "rewind"):
            continue
        step, done = r["step"], r.get("action", "")
        if r["kind"] == "rewind":
            (first, last), (from_, to) = r["dropped"], r["skip"]
            step = r["spike"]
            done = f"rewound to step {r['step']}, dropped {first}-{last}, skipped {from_}-{to}"
        limits = {r["cause"]: r.get("limit")}
        numbers = (_number_text(r[key], limits.get(key)) for key in ("loss", "grad_norm"))
        yield step, f"spike: {r['cause']}", *numbers, done, rows_text(r["rows"])
    for first, last in skipped_ranges(records):
        yield first, "skip", "", "", f"{first}-{last} skipped", ""


def _number_text(value: float | None, limit: float | None) -> str:
    text = "-" if value is None else f"{value:.4g}"
    return text if limit is None else f"{text} (limit {limit:.4g})"
