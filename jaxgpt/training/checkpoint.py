"""Checkpoints by Orbax: sharded, written in the background, complete or not there.

A checkpoint is `checkpoints/<step>/state` (parameters, both moments, Adam's count, as one array
each whatever the mesh) and `checkpoints/<step>/meta` (JSON: configuration, mesh, data). It is
restored into the shardings of the run that reads it, which need not be those that wrote it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import optax

from jaxgpt.training.step import TrainState

_MOMENTS = ("mu", "nu", "count")


class Checkpoints:
    """Saves and restores the state of one run."""

    def __init__(self, directory: Path, keep: int):
        """Opens `directory`/checkpoints, keeping the newest `keep` that are saved from now on."""
        import orbax.checkpoint as ocp

        self._ocp = ocp
        self._manager = ocp.CheckpointManager(
            (directory / "checkpoints").absolute(),
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep, cleanup_tmp_directories=True, create=True
            ),
        )

    def save(self, step: int, state: TrainState, meta: Mapping[str, Any]) -> None:
        """Starts writing; the state may be donated as soon as this returns."""
        args = self._ocp.args
        self._manager.save(
            step,
            args=args.Composite(
                state=args.StandardSave(_to_tree(state)), meta=args.JsonSave(dict(meta))
            ),
            force=True,
        )

    def restore(self, step: int, shapes: TrainState) -> TrainState:
        """The state of `step`, bitwise, laid out as `shapes` (ShapeDtypeStructs) say."""
        args = self._ocp.args
        found = self._manager.restore(
            step, args=args.Composite(state=args.StandardRestore(_to_tree(shapes)))
        )
        return _from_tree(found["state"], shapes)

    def wait(self) -> None:
        """Returns when everything that was saved is on disk."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        self._manager.close()


def _to_tree(state: TrainState) -> dict[str, Any]:
    """The layout on disk: names that do not depend on how the optimizer is put together."""
    moments = {k: optax.tree_utils.tree_get(state.opt_state, k) for k in _MOMENTS}
    return {"params": state.params, **moments}


def _from_tree(tree: Mapping[str, Any], shapes: TrainState) -> TrainState:
    moments = {k: tree[k] for k in _MOMENTS}
    opt_state = optax.tree_utils.tree_set(shapes.opt_state, **moments)
    assert not any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(opt_state))
    return TrainState(tree["params"], opt_state)
