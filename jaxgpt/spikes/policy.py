"""Rewinds of a run. Each is written to rewinds.json before anything is done, and all that is done
can be done twice: a run that is killed in the middle finishes it at its next start."""

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from jaxgpt.checkpoint.metadata import list_checkpoints, read_meta, valid_checkpoints
from jaxgpt.cluster.process_group import ProcessGroup
from jaxgpt.config import Config, UsageError, skip_ranges
from jaxgpt.spikes.skip import SkipRanges
from jaxgpt.tracking.jsonl import atomic_write_text, read_records, truncate_metrics

FILE = "rewinds.json"
METRICS = "metrics.jsonl"


class Rewind(NamedTuple):
    """Where a run goes on from, or why it cannot."""

    problem: str = ""  # empty if the run goes on
    step: int | None = None  # the checkpoint that it goes on from; None is the initial state
    meta: dict[str, Any] = {}
    skip: tuple[int, ...] = ()  # all ranges of steps to skip from now on, as `train_range_to_skip`


def rewind(
    config: Config, directory: Path, cluster: ProcessGroup, spike: dict[str, Any] | None, last: int
) -> Rewind:
    """Go back to an earlier checkpoint, all processes together: files forget the abandoned steps.

    Everything that was being saved is on disk, and no log is open.

    Args:
        spike: its record, on process 0.
        last: the step that the run has come to.
    """

    def on_process_0() -> Rewind:
        # A damaged checkpoint is none to go back to: newer ones would be lost for it.
        problem = decide_rewind(config, directory, list(valid_checkpoints(directory)), spike, last)
        if problem:
            return Rewind(problem)
        finish_rewind(directory)
        saved = list_checkpoints(directory)
        skip = SkipRanges([*skip_ranges(config), *skipped_by_rewinds(directory)]).flat()
        if not saved:
            return Rewind(skip=skip)
        return Rewind("", saved[-1], read_meta(directory, saved[-1]), skip)

    return Rewind(*cluster.broadcast(on_process_0() if cluster.is_main else None))


def read_rewinds(directory: Path) -> list[dict[str, Any]]:
    """Return all rewinds of a run, oldest first.

    Each is the record of its spike and, beside that: `to`, the step of the checkpoint gone back to
    (0 is the initial state); `skip`, the first and last step whose batches are skipped; `dropped`,
    the first and last step that were trained in vain; `done`, whether the files say so already.
    """
    path = directory / FILE
    try:
        rewinds = json.loads(path.read_text()) if path.exists() else []
        if not all({"to", "skip", "dropped", "done"} <= set(rewind) for rewind in list(rewinds)):
            raise ValueError("keys are missing")
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(
            f"{path}: is damaged ({error}); bring it back, or remove it and give the ranges that "
            f"it skipped, which {METRICS} has in its records of rewinds, to --train-range-to-skip"
        ) from None
    return rewinds


def skipped_by_rewinds(directory: Path) -> list[tuple[int, int]]:
    """Return the ranges of steps that the rewinds of a run skip."""
    return [tuple(rewind["skip"]) for rewind in read_rewinds(directory)]


def decide_rewind(
    config: Config, directory: Path, saved: list[int], spike: dict[str, Any], last: int
) -> str:
    """Write down the rewind that a spike calls for, or return why there can be none."""
    rewinds, step = read_rewinds(directory), spike["step"]
    settings, interval = config.spike, config.checkpoint.interval
    if len(rewinds) >= settings.max_rewinds:
        return (
            f"spike.max_rewinds={settings.max_rewinds}: step {step} is a spike once more; look at "
            "its rows with python -m jaxgpt.inspect, then go on with another spike.action, a lower "
            "optimizer.learning_rate or more rewinds"
        )
    latest = step - settings.rewind_margin
    # Those at fixed steps only: what a signal saved must not decide where a run goes back to.
    to = max((s for s in saved if s % interval == 0 and s <= latest), default=0)
    if to == 0 and latest >= interval:  # what there was is gone: too much would be thrown away
        return (
            f"spike.rewind_margin={settings.rewind_margin}: no checkpoint up to step {latest} is "
            f"left to go back to from the spike at step {step}"
        )
    rewind = {
        **{key: value for key, value in spike.items() if key not in ("kind", "step", "action")},
        "spike": step,
        "to": to,
        "skip": [max(to + 1, step - settings.skip_before), step + settings.skip_after],
        "dropped": [to + 1, last],
        "done": False,
    }
    _write(directory, [*rewinds, rewind])
    return ""


def finish_rewind(directory: Path) -> None:
    """Do what was decided last, as far as it is not done: the abandoned steps leave the files."""
    rewinds = read_rewinds(directory)
    if not rewinds or rewinds[-1]["done"]:
        return
    rewind = rewinds[-1]
    for step in reversed(list_checkpoints(directory)):
        if step > rewind["to"]:
            shutil.rmtree(directory / "checkpoints" / str(step))
    metrics = directory / METRICS
    records = read_records(metrics) if metrics.exists() else []
    last = (records[-1]["kind"], records[-1].get("spike")) if records else None
    if records and last != ("rewind", rewind["spike"]):  # else it was written just before
        content = {key: value for key, value in rewind.items() if key not in ("to", "done")}
        losses = [
            [r["step"], r["loss"]]
            for r in records
            if r["kind"] == "train" and r["step"] > rewind["to"] and r["loss"] is not None
        ]
        record = {"kind": "rewind", "step": rewind["to"], **content, "dropped_losses": losses}
        truncate_metrics(metrics, rewind["to"], record)
    rewind["done"] = True
    _write(directory, rewinds)


def _write(directory: Path, rewinds: list[dict[str, Any]]) -> None:
    atomic_write_text(directory / FILE, json.dumps(rewinds, indent=1) + "\n")
