"""Checkpoints by Orbax: sharded, written in the background, complete or not there.

A checkpoint is `checkpoints/<step>/state` (parameters, both moments, Adam's count, as one array
each whatever the mesh) and `checkpoints/<step>/meta` (JSON: configuration, mesh, data). It is
restored into the shardings of the run that reads it, which need not be those that wrote it.
"""

import functools
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxgpt.config import UsageError
from jaxgpt.distributed.partition import Params
from jaxgpt.training.state import TrainState


class Checkpoints:
    """Saves and restores the state of one run."""

    def __init__(self, directory: Path, keep: int):
        """Of `directory`/checkpoints, where only this training run writes.

        When it is first used, what an interrupted save left is removed; of what is saved the
        newest `keep` stay.
        """
        self._folder = (directory / "checkpoints").absolute()
        self._keep = keep

    @functools.cached_property
    def _manager(self) -> Any:
        """Orbax's manager: half a second of imports that the first step need not wait for."""
        import orbax.checkpoint as ocp

        logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax narrates each save
        return ocp.CheckpointManager(
            self._folder,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=self._keep, cleanup_tmp_directories=True, create=True
            ),
        )

    def save(self, step: int, state: TrainState, meta: Mapping[str, Any]) -> None:
        """Starts writing; the state may be donated as soon as this returns."""
        import orbax.checkpoint.args as args

        self._manager.save(
            step,
            args=args.Composite(
                state=args.StandardSave(_to_tree(state)), meta=args.JsonSave(dict(meta))
            ),
            force=True,
        )

    def restore(self, step: int, shapes: TrainState) -> TrainState:
        """The state of `step`, bitwise, laid out as `shapes` (ShapeDtypeStructs) say.

        Raises:
            UsageError: if the checkpoint is damaged.
        """
        import orbax.checkpoint.args as args

        wanted = args.Composite(state=args.StandardRestore(_to_tree(shapes)))
        try:
            found = self._manager.restore(step, args=wanted)
        except (OSError, KeyError, ValueError) as error:
            folder = self._folder / str(step)
            reason = " ".join(str(error).split())[:200]
            raise UsageError(
                f"{folder}: cannot be restored ({reason}); remove it to go on from an older "
                "checkpoint, if there is one"
            ) from error
        state = found["state"]
        return TrainState(state.pop("params"), state)

    def close(self) -> None:
        """Returns when everything that was saved is on disk."""
        self._manager.close()


def restore_params(directory: Path, step: int, shapes: Params) -> Params:
    """The parameters of `step` alone, laid out as `shapes` say: a third of the bytes.

    Only reads, so that a run that is training in `directory` is not disturbed.
    """
    import orbax.checkpoint as ocp

    wanted = {"params": shapes}
    with ocp.PyTreeCheckpointer() as checkpointer:
        found = checkpointer.restore(
            (directory / "checkpoints" / str(step) / "state").absolute(),
            args=ocp.args.PyTreeRestore(
                wanted,
                restore_args=ocp.checkpoint_utils.construct_restore_args(wanted),
                partial_restore=True,
            ),
        )
    return found["params"]


def _to_tree(state: TrainState) -> dict[str, Any]:
    """The layout on disk: parameters, both moments and the count side by side."""
    return {"params": state.params, **state.opt_state}
