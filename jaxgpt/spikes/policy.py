"""Rewinds of a run. Each is written to rewinds.json before anything is done, and all that is done
can be done twice: a run that is killed in the middle finishes it at its next start. Checkpoints of
abandoned steps go last, when the one to go on from has been restored."""

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from jaxgpt.checkpoint.metadata import list_checkpoints, read_meta, valid_checkpoints
from jaxgpt.cluster.process_group import ProcessGroup
from jaxgpt.config import Config, UsageError, in_words, read_json, skip_ranges
from jaxgpt.spikes.skip import SkipRanges
from jaxgpt.tracking.jsonl import METRICS, atomic_write_text, read_records, truncate_metrics
from jaxgpt.tracking.records import REWIND_SHAPE

FILE = "rewinds.json"
# Kinds of records that may stand between a rewind and the steps after it.
BETWEEN_STEPS = ("damage", "start", "goodput", "straggler", "corruption", "staged_restore")
SHAPE = REWIND_SHAPE | {"to": int, "done": bool}


class Rewind(NamedTuple):
    """Where a run goes on from, or why it cannot."""

    problem: str = ""  # empty if the run goes on
    step: int | None = None  # the checkpoint that it goes on from; None is the initial state
    meta: dict[str, Any] = {}
    skip: tuple[int, ...] = ()  # all ranges of steps to skip from now on, as `train_range_to_skip`


def rewind(
    config: Config, directory: Path, cluster: ProcessGroup, spike: dict[str, Any] | None, last: int
) -> Rewind:
    """Find the checkpoint to go back to, all processes together; metrics.jsonl forgets later steps.

    Everything that was being saved is on disk. `finish_rewind` is due once it is restored.

    Args:
        spike: its record, on process 0.
        last: the step that the run has come to.
    """

    def on_process_0() -> Rewind:
        # A damaged checkpoint is none to go back to: newer ones would be lost for it.
        problem = decide_rewind(config, directory, list(valid_checkpoints(directory)), spike, last)
        if problem:
            return Rewind(problem)
        record_rewind(directory)
        to = read_rewinds(directory)[-1]["to"]
        skip = SkipRanges([*skip_ranges(config), *skipped_by_rewinds(directory)]).flat()
        return Rewind("", to, read_meta(directory, to), skip) if to else Rewind(skip=skip)

    return Rewind(*cluster.broadcast(on_process_0() if cluster.is_main else None))


def read_rewinds(directory: Path) -> list[dict[str, Any]]:
    """Return all rewinds of a run, oldest first.

    Each is the record of its spike and, beside that: `to`, the step of the checkpoint gone back to
    (0 is the initial state); `skip`, the first and last step whose batches are skipped; `dropped`,
    the first and last step that were trained in vain; `done`, whether the files say so already.
    """
    path = directory / FILE
    try:
        return read_json(path, [SHAPE]) if path.exists() else []
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{path}: is damaged ({in_words(error)}); bring it back, or remove it and give the "
            f"ranges that it skipped, which {METRICS} has in its records of rewinds, to "
            "--train-range-to-skip"
        ) from None


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


def pending_rewind(directory: Path) -> dict[str, Any] | None:
    """Return the last rewind of a run if it is not finished."""
    rewinds = read_rewinds(directory)
    return rewinds[-1] if rewinds and not rewinds[-1]["done"] else None


def go_further_back(directory: Path, step: int) -> None:
    """Let the rewind that is not finished end at an older checkpoint."""
    rewinds = read_rewinds(directory)
    rewinds[-1] |= {"to": step, "dropped": [step + 1, rewinds[-1]["dropped"][1]]}
    _write(directory, rewinds)
    record_rewind(directory)


def record_rewind(directory: Path) -> None:
    """Move the steps that the last rewind abandons from metrics.jsonl to a record of it there."""
    rewind, metrics = read_rewinds(directory)[-1], directory / METRICS
    records = read_records(metrics) if metrics.exists() else []
    if not records:
        return
    # What this has written before, for the same rewind or for one to a newer checkpoint.
    tail = [r for r in records if r["kind"] not in BETWEEN_STEPS][-1:]
    ours = [r for r in tail if (r["kind"], r.get("spike")) == ("rewind", rewind["spike"])]
    before = ours[0] if ours else None
    if before and before["step"] == rewind["to"]:
        return
    losses = [
        [r["step"], r["loss"]]
        for r in records
        if r["kind"] == "train" and r["step"] > rewind["to"] and r["loss"] is not None
    ]
    losses += before["dropped_losses"] if before else []
    content = {key: value for key, value in rewind.items() if key not in ("to", "done")}
    record = {"kind": "rewind", "step": rewind["to"], **content, "dropped_losses": losses}
    truncate_metrics(metrics, rewind["to"], record, replaces=before)


def finish_rewind(directory: Path) -> None:
    """Remove the checkpoints of the steps that the last rewind abandons, if that is not done."""
    rewinds = read_rewinds(directory)
    if not rewinds or rewinds[-1]["done"]:
        return
    for step in reversed(list_checkpoints(directory)):
        if step > rewinds[-1]["to"]:
            shutil.rmtree(directory / "checkpoints" / str(step))
    rewinds[-1]["done"] = True
    _write(directory, rewinds)


def _write(directory: Path, rewinds: list[dict[str, Any]]) -> None:
    atomic_write_text(directory / FILE, json.dumps(rewinds, indent=1) + "\n")
