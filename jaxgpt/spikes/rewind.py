"""Going back to a checkpoint from a spike: all processes together."""

import dataclasses

from jaxgpt.checkpoint.metadata import read_meta, valid_checkpoints
from jaxgpt.cluster.process_group import ProcessGroup
from jaxgpt.config import skip_ranges
from jaxgpt.spikes.policy import decide_rewind, finish_rewind, skipped_by_rewinds
from jaxgpt.spikes.skip import SkipRanges
from jaxgpt.tracking.trackers import Record
from jaxgpt.train.run_directory import Run, list_checkpoints


def rewound(run: Run, cluster: ProcessGroup, spike: Record | None, last: int) -> tuple[Run, str]:
    """The run as it goes on from an earlier checkpoint, or why it cannot.

    Everything that was being saved is on disk, and no log is open.

    Args:
        spike: its record, on process 0.
        last: the step that the run has come to.
    """

    def on_process_0() -> dict:
        # One that is damaged is none to go back to: what is newer would be lost for it.
        saved = list(valid_checkpoints(run.directory, list_checkpoints(run.directory)))
        problem = decide_rewind(run.config, run.directory, saved, spike, last)
        if problem:
            return {"problem": problem}
        finish_rewind(run.directory)
        saved = list_checkpoints(run.directory)
        ranges = [*skip_ranges(run.config), *skipped_by_rewinds(run.directory)]
        return {
            "problem": "",
            "step": saved[-1] if saved else None,
            "meta": read_meta(run.directory, saved[-1]) if saved else {},
            "skip": SkipRanges(ranges).flat(),
        }

    found = cluster.broadcast(on_process_0() if cluster.is_main else None)
    if found["problem"]:
        return run, found["problem"]
    config = run.config.replace(train_range_to_skip=tuple(found["skip"]))
    run = dataclasses.replace(
        run, config=config, resume_step=found["step"], resume_meta=found["meta"]
    )
    return run, ""
