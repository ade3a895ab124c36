"""Going back to a checkpoint from a spike: all processes together."""

from pathlib import Path
from typing import Any, NamedTuple

from jaxgpt.checkpoint.metadata import list_checkpoints, read_meta, valid_checkpoints
from jaxgpt.cluster.process_group import ProcessGroup
from jaxgpt.config import Config, skip_ranges
from jaxgpt.spikes.policy import decide_rewind, finish_rewind, skipped_by_rewinds
from jaxgpt.spikes.skip import SkipRanges


class Rewind(NamedTuple):
    """Where a run goes on from, or why it cannot."""

    problem: str = ""
    """Empty if the run goes on."""
    step: int | None = None
    """The checkpoint that it goes on from; None is the initial state."""
    meta: dict[str, Any] = {}
    skip: tuple[int, ...] = ()
    """All ranges of steps to skip from now on, as `train_range_to_skip`."""


def rewind(
    config: Config, directory: Path, cluster: ProcessGroup, spike: dict[str, Any] | None, last: int
) -> Rewind:
    """Go back to an earlier checkpoint: the files of the run forget the abandoned steps.

    Everything that was being saved is on disk, and no log is open.

    Args:
        spike: its record, on process 0.
        last: the step that the run has come to.
    """

    def on_process_0() -> Rewind:
        # A damaged checkpoint is none to go back to: newer ones would be lost for it.
        saved = list(valid_checkpoints(directory))
        problem = decide_rewind(config, directory, saved, spike, last)
        if problem:
            return Rewind(problem)
        finish_rewind(directory)
        saved = list_checkpoints(directory)
        skip = SkipRanges([*skip_ranges(config), *skipped_by_rewinds(directory)]).flat()
        if not saved:
            return Rewind(skip=skip)
        return Rewind("", saved[-1], read_meta(directory, saved[-1]), skip)

    return Rewind(*cluster.broadcast(on_process_0() if cluster.is_main else None))
