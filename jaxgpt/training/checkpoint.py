"""Checkpoints by Orbax: sharded, written in the background, complete or not there.

A checkpoint is `checkpoints/<step>/state` (parameters, both moments, Adam's count, as one array
each whatever the mesh) and `checkpoints/<step>/meta` (JSON: configuration, mesh, data, and what
the detector of spikes remembers). It is restored into the shardings of the run that reads it, which
need not be those that wrote it.

Numbers are stored as they are: compressing them takes longer than writing them, for 8 to 9 % of
their size.
"""

import functools
import json
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jaxgpt.config import Config, UsageError
from jaxgpt.distributed.partition import Params
from jaxgpt.training.detection import watch_from_json, watch_to_json
from jaxgpt.training.state import TrainState

# A process writes several files of about this size at the same time, not one after the other.
DATA_FILE_BYTES = 2**28


class Checkpoints:
    """Saves and restores the state of one run."""

    def __init__(self, directory: Path, config: Config):
        """Of `directory`/checkpoints, where only this training run writes.

        When it is first used, what an interrupted save left is removed. Of what is saved the
        newest checkpoint.keep stay; where rewinds may need them, also the newest of those that
        are checkpoint.interval apart, whatever else a signal saved in between.
        """
        self._folder = (directory / "checkpoints").absolute()
        self._config = config

    @functools.cached_property
    def _manager(self) -> Any:
        """Orbax's manager: half a second of imports that the first step need not wait for."""
        import orbax.checkpoint as ocp

        logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax narrates each save
        policies, kept = ocp.checkpoint_managers, self._config.checkpoint
        policy = policies.LatestN(kept.keep)
        if self._config.spike.action == "rewind":
            regular = policies.EveryNSteps(kept.interval, max_to_keep=kept.keep)
            policy = policies.AnyPreservationPolicy([policy, regular])
        return ocp.CheckpointManager(
            self._folder,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=policy, cleanup_tmp_directories=True, create=True
            ),
            item_handlers={
                "state": ocp.PyTreeCheckpointHandler(use_compression=False),
                "meta": ocp.JsonCheckpointHandler(),
            },
        )

    def save(self, step: int, state: TrainState, meta: Mapping[str, Any]) -> None:
        """Starts writing; the state may be donated as soon as this returns."""
        import orbax.checkpoint as ocp

        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.PyTreeSave(
                    _to_tree(state), ocdbt_target_data_file_size=DATA_FILE_BYTES
                ),
                meta=ocp.args.JsonSave({**meta, "watch": watch_to_json(state.watch)}),
            ),
            force=True,
        )

    def restore(self, step: int, shapes: TrainState) -> TrainState:
        """The state of `step`, bitwise, laid out as `shapes` (ShapeDtypeStructs) say.

        Raises:
            UsageError: if the checkpoint is damaged.
        """
        import orbax.checkpoint as ocp

        wanted = _to_tree(shapes)
        restore_args = ocp.checkpoint_utils.construct_restore_args(wanted)
        try:
            found = self._manager.restore(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.PyTreeRestore(wanted, restore_args=restore_args)
                ),
            )
        except Exception as error:  # Orbax and TensorStore have many, and bare ones
            remedy = "remove it to go on from an older checkpoint, if there is one"
            raise _damage(error, self._folder / str(step), remedy) from error
        state = found["state"]
        meta = json.loads((self._folder / str(step) / "meta" / "metadata").read_text())
        watch = watch_from_json(meta.get("watch"), shapes.watch)
        return TrainState(state.pop("params"), state, watch)

    def close(self) -> None:
        """Returns when everything that was saved is on disk; the next use looks there anew."""
        self._manager.close()
        del self._manager


def restore_params(directory: Path, step: int, shapes: Params) -> Params:
    """The parameters of `step` alone, laid out as `shapes` say: a third of the bytes.

    Only reads, so that a run that is training in `directory` is not disturbed.

    Raises:
        UsageError: if the checkpoint is damaged.
    """
    import orbax.checkpoint as ocp

    wanted = {"params": shapes}
    folder = directory / "checkpoints" / str(step)
    try:
        with ocp.PyTreeCheckpointer() as checkpointer:
            found = checkpointer.restore(
                (folder / "state").absolute(),
                args=ocp.args.PyTreeRestore(
                    wanted,
                    restore_args=ocp.checkpoint_utils.construct_restore_args(wanted),
                    partial_restore=True,
                ),
            )
    except Exception as error:  # Orbax and TensorStore have many, and bare ones
        raise _damage(error, folder, "take another step") from error
    return found["params"]


def _damage(error: Exception, folder: Path, remedy: str) -> Exception:
    """What to raise where Orbax raised `error`: a sentence if files lack or are cut.

    Reads that are still under way are not heard any more: each would find Orbax's event loop
    closed, and print a traceback about that.
    """
    cause = error.__cause__ or error
    if isinstance(cause, MemoryError | jax.errors.JaxRuntimeError):  # of devices, not of files
        return RuntimeError(f"{folder}: not restored")
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if "Event loop is closed" not in str(unraisable.exc_value):
            before(unraisable)

    sys.unraisablehook = hook
    reason = " ".join(str(cause).split())
    return UsageError(f"{folder}: cannot be restored ({reason[:200]}); {remedy}")


def _to_tree(state: TrainState) -> dict[str, Any]:
    """The layout on disk: parameters, both moments and the count side by side; not the watch,
    which checkpoints of before had not, and which JSON holds."""
    return {"params": state.params, **state.opt_state}
