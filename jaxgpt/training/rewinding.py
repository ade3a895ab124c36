"""Going back to a checkpoint from a spike: all processes together."""

import dataclasses

from jaxgpt.config import skip_ranges
from jaxgpt.distributed.cluster import Cluster
from jaxgpt.telemetry.trackers import Record
from jaxgpt.training.metadata import read_meta, readable_metas
from jaxgpt.training.rewinds import decide_rewind, finish_rewind, skipped_by_rewinds
from jaxgpt.training.run_directory import Run, saved_steps
from jaxgpt.training.spikes import SkipRanges


def rewound(run: Run, cluster: Cluster, spike: Record | None, last: int) -> tuple[Run, str]:
    """The run as it goes on from an earlier checkpoint, or why it cannot.

    Everything that was being saved is on disk, and no log is open.

    Args:
        spike: its record, on process 0.
        last: the step that the run has come to.
    """

    def on_process_0() -> dict:
        # One that is damaged is none to go back to: what is newer would be lost for it.
        saved = list(readable_metas(run.directory, saved_steps(run.directory)))
        problem = decide_rewind(run.config, run.directory, saved, spike, last)
        if problem:
            return {"problem": problem}
        finish_rewind(run.directory)
        saved = saved_steps(run.directory)
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
