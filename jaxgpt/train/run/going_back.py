"""Going back: the run as of an older checkpoint."""

import dataclasses
from typing import Any

from jaxgpt.checkpoint.metadata import (
    DamagedCheckpoint,
    set_aside,
    valid_checkpoints,
)
from jaxgpt.cluster.process_group import ProcessGroup
from jaxgpt.config import skip_ranges
from jaxgpt.spikes.policy import go_further_back, pending_rewind
from jaxgpt.train.run.directory import Run
from jaxgpt.train.run.resume import missing_records, ranges_to_skip


def go_back_to_older(run: Run, cluster: ProcessGroup, error: DamagedCheckpoint) -> Run:
    """Set the checkpoint of `run.resume_step` aside; return the run as of the one before it.

    All processes together. Raises `error` if there is none, or with checkpoint.on_damage=refuse.
    """

    def on_process_0() -> dict[str, Any] | None:
        refused = run.config.checkpoint.on_damage == "refuse"
        if not cluster.is_main or refused or run.resume_step is None:  # of train.init_from
            return None
        older = {s: m for s, m in valid_checkpoints(run.directory).items() if s < run.resume_step}
        if not older:
            return None
        damaged, step = set_aside(run.directory, run.resume_step, error.reason), max(older)
        if pending_rewind(run.directory):
            go_further_back(run.directory, step)
        asked = skip_ranges(run.config.replace(train_range_to_skip=tuple(run.asked_to_skip)))
        skip, _ = ranges_to_skip(run.directory, asked, step, older[step])
        return {
            "skip": skip,
            "resume_step": step,
            "resume_meta": older[step],
            "damaged": [*run.damaged, damaged],
            "missing_records": missing_records(run.config, run.dataset, step),
        }

    found = cluster.broadcast(cluster.run_on_all(on_process_0))
    if found is None:
        raise error
    config = run.config.replace(train_range_to_skip=tuple(found.pop("skip")))
    return dataclasses.replace(run, config=config, **found)


def newest_state(run: Run, cluster: ProcessGroup) -> Run:
    """Return the run as of its newest checkpoint, or of its start. All processes together."""

    def on_process_0() -> dict[str, Any] | None:
        if not cluster.is_main:
            return None
        saved = valid_checkpoints(run.directory)
        step = max(saved, default=None)
        return {"resume_step": step, "resume_meta": {} if step is None else saved[step]}

    return dataclasses.replace(run, **cluster.broadcast(cluster.run_on_all(on_process_0)))
