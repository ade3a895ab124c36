"""Rewinds after loss spikes: deciding on a rewind, and recording it in the run directory.

A rewind is committed after its checkpoint has been restored (`train/restart.py`). Each part of the
commit is idempotent, so the next start of the run can complete an interrupted commit.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from jaxgpt.checkpoint.metadata import list_checkpoints
from jaxgpt.config import Config, UsageError, in_words, read_json
from jaxgpt.data.batch_sizes import BatchSizes
from jaxgpt.tracking.jsonl import METRICS, atomic_write_text, read_records, truncate_metrics
from jaxgpt.tracking.records import REWIND_SHAPE

FILE = "rewinds.json"
# Record kinds that may appear between a rewind record and the next step.
BETWEEN_STEPS = ("damage", "start", "goodput", "straggler", "corruption")
SHAPE = REWIND_SHAPE | {"to": int, "done": bool, "sequences": (int, int)}


class NoRewind(Exception):
    """Raised if a run has to stop at a spike because it cannot rewind."""


def read_rewinds(directory: Path) -> list[dict[str, Any]]:
    """Return all rewinds of a run, oldest first. The list may be empty.

    A rewind is a dict. It has the fields of a `SpikeRecord` except `kind`, `step` and `action`. It
    also has these keys:

    - `spike`: the step of the spike.
    - `to`: the step of the checkpoint that the run went back to; 0 is the initial state.
    - `skip`: the first and the last step to skip, as a list, with the batch sizes at the rewind.
    - `sequences`: the first and the last sequence to skip, as a list. If the batch size changes,
      these sequences are in other steps.
    - `dropped`: the first and the last abandoned step, as a list.
    - `done`: whether the checkpoints of the abandoned steps have been removed.

    Raises `UsageError` if rewinds.json is damaged or unreadable.
    """
    path = directory / FILE
    try:
        return read_json(path, [SHAPE]) if path.exists() else []
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{path}: is damaged ({in_words(error)}); restore it, or remove it and pass the "
            f"skipped ranges to --train-range-to-skip (the rewind records in {METRICS} list these "
            "ranges as `skip`)"
        ) from None


def skipped_by_rewinds(directory: Path, sizes: BatchSizes) -> list[tuple[int, int]]:
    """Return the ranges of steps that the rewinds of a run skip, as inclusive (first, last) pairs.

    With the batch sizes `sizes`, these steps contain the sequences that the rewinds skip.
    """
    return [skipped_by(rewind, sizes) for rewind in read_rewinds(directory)]


def skipped_by(rewind: dict[str, Any], sizes: BatchSizes) -> tuple[int, int]:
    """Return the first and the last step that a rewind skips, given the run's batch sizes."""
    first, last = rewind["sequences"]
    return sizes.step_of(first), sizes.step_of(last)


def decide_rewind(
    config: Config,
    directory: Path,
    saved: list[int],
    spike: dict[str, Any],
    last: int,
    sizes: BatchSizes,
) -> dict[str, Any]:
    """Return the rewind that a spike causes, without starting it.

    See `read_rewinds` for the format.

    Args:
        config: the configuration; spike.action must be rewind.
        directory: the run directory.
        saved: the steps of the undamaged checkpoints.
        spike: the record of the spike, as a dict.
        last: the last completed step.
        sizes: the batch sizes of the steps so far.

    Raises:
        NoRewind: if there have been too many consecutive rewinds, or if there is no checkpoint to
            go back to and the spike is at step checkpoint.interval + spike.rewind_margin or later.
    """
    step, settings, interval = spike["step"], config.spike, config.checkpoint.interval
    latest = step - settings.rewind_margin
    # Prefer regular checkpoints, so that a save caused by a signal does not affect the rewind. If
    # checkpoint.interval has changed, there may be none.
    early = [s for s in saved if s <= latest]
    to = max((s for s in early if s % interval == 0), default=0)
    if to == 0 and latest >= interval:
        to = max(early, default=0)
    if _rewinds_in_a_row(read_rewinds(directory), to) >= settings.max_rewinds:
        raise NoRewind(
            f"spike.max_rewinds={settings.max_rewinds}: step {step} spiked again; look at the "
            "rows of this step with python -m jaxgpt.inspect, then continue with another "
            "spike.action, a lower optimizer.learning_rate or a larger spike.max_rewinds"
        )
    if to == 0 and latest >= interval:  # restarting from step 0 would lose too many steps
        raise NoRewind(
            f"spike.rewind_margin={settings.rewind_margin}: cannot rewind from step "
            f"{step}, because there is no checkpoint at or before step {latest}; continue with a "
            "smaller margin or another spike.action"
        )
    # If the batch size changed after `to`, the sequences to skip now belong to different steps.
    first = sizes.consumed(max(to, step - settings.skip_before - 1))
    end = sizes.consumed(step + settings.skip_after)
    sizes = sizes.change_after(to, config.train.batch_size)
    return {
        **{key: value for key, value in spike.items() if key not in ("kind", "step", "action")},
        "spike": step,
        "to": to,
        "skip": [sizes.step_of(first), sizes.step_of(end - 1)],
        "sequences": [first, end - 1],
        "dropped": [to + 1, last],
        "done": False,
    }


def _rewinds_in_a_row(rewinds: list[dict[str, Any]], to: int) -> int:
    """Count the most recent consecutive rewinds to step `to` or later.

    `rewinds` is the result of `read_rewinds`. Counting stops at a rewind to an earlier step,
    because the run has made progress since that rewind.
    """
    count = 0
    for rewind in reversed(rewinds):
        if rewind["to"] < to:
            break
        count += 1
    return count


def pending_rewind(directory: Path) -> dict[str, Any] | None:
    """Return the last rewind of a run if its commit was interrupted, otherwise None."""
    rewinds = read_rewinds(directory)
    return rewinds[-1] if rewinds and not rewinds[-1]["done"] else None


def commit_rewind(directory: Path, rewind: dict[str, Any], to: int) -> None:
    """Write a rewind to rewinds.json and metrics.jsonl.

    In metrics.jsonl, a single record of the rewind replaces the records of the abandoned steps.
    Other records whose kind is in `PERSISTENT_KINDS` are kept. If metrics.jsonl is missing or has
    no records, nothing is written to it.

    Args:
        directory: the run directory.
        rewind: the rewind, in the format of `read_rewinds`. It may be the pending rewind.
        to: the step of the restored checkpoint; 0 is the initial state. It is lower than
            `rewind["to"]` if the checkpoint of that step was damaged or is missing.
    """
    rewinds = [r for r in read_rewinds(directory) if r["done"]]
    rewind = {**rewind, "to": to, "dropped": [to + 1, rewind["dropped"][1]]}
    _write(directory, [*rewinds, rewind])
    metrics = directory / METRICS
    records = read_records(metrics) if metrics.exists() else []
    if not records:
        return
    # An interrupted commit of the same rewind may have written its record already.
    tail = [r for r in records if r["kind"] not in BETWEEN_STEPS][-1:]
    same = [r for r in tail if (r["kind"], r.get("spike")) == ("rewind", rewind["spike"])]
    before = same[0] if same else None
    if before and before["step"] == to:
        return
    losses = [
        [r["step"], r["loss"]]
        for r in records
        if r["kind"] == "train" and r["step"] > to and r["loss"] is not None
    ]
    losses += before["dropped_losses"] if before else []
    left_out = ("to", "done", "sequences")
    content = {key: value for key, value in rewind.items() if key not in left_out}
    record = {"kind": "rewind", "step": to, **content, "dropped_losses": losses}
    truncate_metrics(metrics, to, record, replaces=before)


def finish_rewind(directory: Path) -> None:
    """Remove the checkpoints of abandoned steps, and mark the last rewind as done.

    Checkpoints in checkpoint.local are not removed. The run must have at least one rewind. If there
    is an error, this is repeated when the run starts again. Raises `OSError` if a checkpoint cannot
    be removed.
    """
    rewinds = read_rewinds(directory)
    for step in reversed(list_checkpoints(directory)):
        if step > rewinds[-1]["to"]:
            shutil.rmtree(directory / "checkpoints" / str(step))
    rewinds[-1]["done"] = True
    _write(directory, rewinds)


def _write(directory: Path, rewinds: list[dict[str, Any]]) -> None:
    atomic_write_text(directory / FILE, json.dumps(rewinds, indent=1) + "\n")
