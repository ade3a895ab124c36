"""Checkpoints by Orbax: sharded, written in the background, complete or not there.

A checkpoint is `checkpoints/<step>/state` (`params` and `opt_state`, each array whole whatever the
mesh) and `checkpoints/<step>/meta` (JSON: configuration, mesh, data, the spike detector's window,
and a checksum of each array). It is restored into the shardings of the run that reads it, which
need not be those that wrote it.

Numbers are stored as they are: compressing them takes longer than writing them, for 8 to 9 % of
their size.
"""

import contextlib
import functools
import logging
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from jaxgpt.checkpoint.checksums import checksums
from jaxgpt.checkpoint.metadata import add_checksum, load_metadata
from jaxgpt.config import Config, UsageError
from jaxgpt.parallel.sharding import Params
from jaxgpt.tracking.jsonl import NO_ROOM

Tree = dict[str, Any]  # nested, of arrays or their shapes

# A process writes several files of about this size at the same time, not one after the other.
DATA_FILE_BYTES = 2**28
# Not all of them show in the room that a file system says it has: quotas do not.
NO_ROOM_WORDS = tuple(map(os.strerror, NO_ROOM))

# In what Orbax logs: that a checkpoint is not going to be complete, and what it raises soon anyway.
ORBAX_FAILS = ("_SignalingThread.run() raised", "Handler Commit operations")
ORBAX_RAISES = ("Checkpointer failed", "Save Finalize")
# Of what Orbax has left undone when one array cannot be read, or when Python ends.
ORBAX_LEAVES = ("Event loop is closed", "sys.meta_path is None", "while reading array index")


class Checkpoints:
    """Saves and restores the state of one run."""

    def __init__(self, directory: Path, config: Config):
        """Open `directory`/checkpoints, where only this training run writes.

        When it is first used, what an interrupted save left is removed. Of what is saved the
        newest checkpoint.keep stay; where rewinds may need them, also the newest of those that
        are checkpoint.interval apart, whatever else a signal saved in between.
        """
        self._folder = (directory / "checkpoints").absolute()
        self._config = config
        _orbax_log().failure = None  # of another run in this process

    @functools.cached_property
    def _manager(self) -> Any:
        """Orbax's manager: half a second of imports that the first step need not wait for."""
        import orbax.checkpoint as ocp

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

    def check_room(self, step: int, tree: Tree) -> None:
        """Check that there is room for one more checkpoint, where the file system says so.

        Raises:
            UsageError: if there is too little.
        """
        needed = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(tree))
        disk = shutil.disk_usage(self._folder.parent)
        if disk.total and needed > disk.free:
            raise UsageError(
                f"{self._folder / str(step)}: a checkpoint takes {needed / 1e6:,.1f} MB, and "
                f"{disk.free / 1e6:,.1f} MB are free there; make room, and start again with the "
                "same --out to go on from the newest one that is complete, if there is one"
            )

    def save(self, step: int, tree: Tree, meta: Mapping[str, Any]) -> None:
        """Start writing arrays and JSON; the arrays may be donated as soon as this returns.

        Raises:
            UsageError: if there is no room for it, or was none for what was being saved before.
        """
        import orbax.checkpoint as ocp

        self._finish()
        self.check_room(step, tree)
        meta = {**meta, "checksums": checksums(tree)}
        with _writing(self._folder):
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.PyTreeSave(tree, ocdbt_target_data_file_size=DATA_FILE_BYTES),
                    meta=ocp.args.JsonSave(add_checksum(meta)),
                ),
                force=True,
            )

    def check(self) -> None:
        """Raise what has gone wrong in the background: to be asked at every step.

        Raises:
            UsageError: if there was no room for what is being saved.
            RuntimeError: if something else has stopped it.
        """
        failure, _orbax_log().failure = _orbax_log().failure, None
        if failure is not None:
            with _writing(self._folder):
                raise RuntimeError(f"{self._folder}: not saved: {failure}") from failure

    def _finish(self) -> None:
        """Wait for what is being saved. Orbax alone would wait for processes that have failed."""
        while self._manager.is_saving_in_progress():
            self.check()
            time.sleep(0.002)
        with _writing(self._folder):
            self._manager.wait_until_finished()

    def restore(self, step: int, shapes: Tree) -> tuple[Tree, dict[str, Any]]:
        """Return the arrays of `step`, bitwise, laid out as `shapes` say, and its JSON.

        Args:
            shapes: `jax.ShapeDtypeStruct`s with shardings.

        Raises:
            UsageError: if the checkpoint is damaged.
        """
        import orbax.checkpoint as ocp

        folder = self._folder / str(step)
        restore_args = ocp.checkpoint_utils.construct_restore_args(shapes)
        remedy = "remove it to go on from an older checkpoint, if there is one"
        try:
            found = self._manager.restore(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.PyTreeRestore(shapes, restore_args=restore_args)
                ),
            )
        except Exception as error:  # Orbax and TensorStore have many, and bare ones
            raise _damage(error, folder, remedy) from error
        meta = load_metadata(folder)
        _check(found["state"], meta, folder, remedy)
        return found["state"], meta

    def close(self) -> None:
        """Return when everything that was saved is on disk; the next use looks there anew.

        Raises:
            UsageError: if there was no room for it.
        """
        self._finish()
        with _writing(self._folder):
            self._manager.close()
        del self._manager


def restore_params(directory: Path, step: int, shapes: Params) -> Params:
    """Return the parameters of `step` alone, laid out as `shapes` say: a third of the bytes.

    Only reads, so that a run that is training in `directory` is not disturbed.

    Raises:
        UsageError: if the checkpoint is damaged.
    """
    import orbax.checkpoint as ocp

    _orbax_log()
    wanted, remedy = {"params": shapes}, "take another step"
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
        raise _damage(error, folder, remedy) from error
    _check(found, load_metadata(folder), folder, remedy)
    return found["params"]


def _check(tree: Any, meta: Mapping[str, Any], folder: Path, remedy: str) -> None:
    """Compare arrays with what was saved.

    Raises:
        UsageError: if one differs.
    """
    found, saved = checksums(tree), meta["checksums"]
    differ = [path for path in found if found[path] != saved.get(path)]
    if differ:
        raise UsageError(
            f"{folder}: {differ[0]} is not what was saved, by its checksum ({len(differ)} of "
            f"{len(found)} arrays); try again, or {remedy}"
        )


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Turns what Orbax raises where there is no room into a `UsageError`."""
    try:
        yield
    except Exception as error:  # TensorStore's are ValueErrors
        reason = next((words for words in NO_ROOM_WORDS if words in str(error)), None)
        if reason is None:
            raise
        raise UsageError(
            f"{folder}: a checkpoint could not be written ({reason}); make room, and start again "
            "with the same --out to go on from the newest one that is complete, if there is one"
        ) from error


def _damage(error: Exception, folder: Path, remedy: str) -> Exception:
    """Return what to raise where Orbax raised `error`: a sentence if files lack or are cut."""
    cause = error.__cause__ or error
    if isinstance(cause, MemoryError | jax.errors.JaxRuntimeError):  # of devices, not of files
        return RuntimeError(f"{folder}: not restored")
    reason = " ".join(str(cause).split())
    return UsageError(f"{folder}: cannot be restored ({reason[:200]}); {remedy}")


class _OrbaxLog(logging.Handler):
    """What Orbax logs as errors, without its tracebacks.

    It logs at once what has failed in the background, and raises it when it is waited for; in a job
    of several processes only after it has waited 20 minutes for the others.
    """

    failure: BaseException | None = None
    """Why a checkpoint is not going to be complete."""

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        error = record.exc_info[1] if record.exc_info else None
        if error and any(words in message for words in ORBAX_FAILS):
            self.failure = self.failure or error
        elif not any(words in message for words in ORBAX_RAISES):
            print(f"warning: Orbax: {message} {error or ''}", file=sys.stderr, flush=True)


@functools.cache
def _orbax_log() -> _OrbaxLog:
    """Silence Orbax, which narrates each save and prints the errors that it also raises.

    What is still being read or written after one would find an event loop closed, or Python itself,
    and print a traceback about that.
    """
    handler = _OrbaxLog(logging.ERROR)
    absl, asyncio = logging.getLogger("absl"), logging.getLogger("asyncio")
    absl.setLevel(logging.ERROR)
    absl.addHandler(handler)
    absl.propagate = False
    asyncio.addFilter(lambda record: "OCDBT" not in record.getMessage())  # TensorStore's files
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        reason = str(unraisable.exc_value)
        if not any(words in reason for words in ORBAX_LEAVES):
            before(unraisable)

    sys.unraisablehook = hook
    return handler
