"""Checkpoints by Orbax: sharded, written in the background, complete or not there."""

import contextlib
import functools
import logging
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from jaxgpt.checkpoint.checksums import checksums
from jaxgpt.checkpoint.metadata import (
    DamagedCheckpoint,
    add_checksum,
    list_checkpoints,
    read_meta,
)
from jaxgpt.config import Config, UsageError
from jaxgpt.parallel.sharding import Params
from jaxgpt.tracking.jsonl import NO_ROOM

Tree = dict[str, Any]  # nested, of arrays or their shapes

SCRATCH_SUFFIX = ".orbax-checkpoint-tmp"  # of Orbax's folders that are not complete
# A process writes several files of about this size at the same time, not one after the other.
DATA_FILE_BYTES = 2**28
# Quotas show in these errors only, not in the room that a file system says it has.
NO_ROOM_WORDS = tuple(map(os.strerror, NO_ROOM))
MAKE_ROOM = (
    "make room, and start again with the same --out to go on from the newest complete one, if any"
)


class Checkpoints:
    """Saves and restores the state of one run, in `directory`/checkpoints.

    The newest checkpoint.keep stay. With spike.action=rewind so do the newest of those that are
    checkpoint.interval apart, whatever a signal saved in between. An older one is removed once the
    next one after it is complete: when it is waited for, before the next save or at the end.
    """

    def __init__(self, directory: Path, config: Config):
        self._folder = (directory / "checkpoints").absolute()
        self._config = config
        self._removals: list[threading.Thread] = []

    @functools.cached_property
    def _checkpointer(self) -> Any:
        """Orbax's checkpointer: half a second of imports that the first step need not wait for.

        CheckpointManager, which would also remove old checkpoints, does not say that a save has
        failed before all processes have come to its end.
        """
        import orbax.checkpoint as ocp

        silence_orbax()
        if jax.process_index() == 0:  # what an interrupted save left
            for scratch in self._folder.glob(f"*{SCRATCH_SUFFIX}"):
                shutil.rmtree(scratch, ignore_errors=True)
        return ocp.AsyncCheckpointer(
            ocp.CompositeCheckpointHandler(
                # Compression would take longer than writing, for 8 to 9 % of the size.
                state=ocp.PyTreeCheckpointHandler(use_compression=False),
                meta=ocp.JsonCheckpointHandler(),
            )
        )

    def check_room(self, step: int, tree: Tree) -> None:
        """Raise `UsageError` if the file system says that it has no room for a checkpoint."""
        needed = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(tree))
        disk = shutil.disk_usage(self._folder.parent)
        if disk.total and needed > disk.free:
            raise UsageError(
                f"{self._folder / str(step)}: a checkpoint takes {needed / 1e6:,.1f} MB, and "
                f"{disk.free / 1e6:,.1f} MB are free there; {MAKE_ROOM}"
            )

    def save(self, step: int, tree: Tree, meta: Mapping[str, Any]) -> None:
        """Start writing arrays and JSON; the arrays may be donated as soon as this returns.

        Raises `UsageError` if there is no room for it, or was none for the save before it.
        """
        import orbax.checkpoint as ocp

        self._finish()
        if jax.process_index() == 0:
            self._wait_for_removals()  # which make room
            self.check_room(step, tree)
        meta = {**meta, "step": step, "checksums": checksums(tree)}
        with _no_room_is_usage_error(self._folder):
            self._checkpointer.save(
                self._folder / str(step),
                args=ocp.args.Composite(
                    state=ocp.args.PyTreeSave(tree, ocdbt_target_data_file_size=DATA_FILE_BYTES),
                    meta=ocp.args.JsonSave(add_checksum(meta)),
                ),
            )

    def check(self) -> None:
        """Raise what has gone wrong in the background; `UsageError` if there was no room."""
        if "_checkpointer" in vars(self):
            with _no_room_is_usage_error(self._folder):
                self._checkpointer.check_for_errors()

    def _finish(self) -> None:
        """Wait for what is being saved, then begin to remove what is old."""
        if "_checkpointer" not in vars(self):
            return
        with _no_room_is_usage_error(self._folder):
            self._checkpointer.wait_until_finished()
        saved, settings = list_checkpoints(self._folder.parent), self._config.checkpoint
        kept = saved[-settings.keep :]
        if self._config.spike.action == "rewind":
            kept += [step for step in saved if step % settings.interval == 0][-settings.keep :]
        for step in set(saved).difference(kept) if jax.process_index() == 0 else ():
            # Under another name it is no checkpoint, however little of it is left.
            path = self._folder / str(step)
            with contextlib.suppress(OSError):  # such a folder is still there: the next time
                scratch = path.rename(f"{path}{SCRATCH_SUFFIX}")
                removal = threading.Thread(target=shutil.rmtree, args=(scratch, True))
                removal.start()
                self._removals.append(removal)

    def _wait_for_removals(self) -> None:
        while self._removals:
            self._removals.pop().join()

    def restore(
        self, step: int, shapes: Tree, run_on_all: Callable[..., Any] | None = None
    ) -> tuple[Tree, dict[str, Any]]:
        """Return the arrays of `step`, bitwise, laid out as `shapes` say, and its JSON.

        Args:
            shapes: `jax.ShapeDtypeStruct`s with shardings.
            run_on_all: `ProcessGroup.run_on_all`, of a job of several processes.

        Raises:
            DamagedCheckpoint: on every process, if one of them finds the checkpoint damaged.
        """
        self._finish()
        remedy = "remove it to go on from an older checkpoint, if there is one"
        return _read(self._folder.parent, step, shapes, remedy, run_on_all)

    def close(self) -> None:
        """Write everything to disk and end Orbax's threads; the next save starts them again.

        Raises `UsageError` if there was no room.
        """
        try:
            self._finish()
        finally:
            self._wait_for_removals()
            if "_checkpointer" in vars(self):
                vars(self).pop("_checkpointer").close()


def restore_params(directory: Path, step: int, shapes: Params) -> Params:
    """Return the parameters of `step` alone, laid out as `shapes` say.

    With AdamW they are a third of the bytes. Only reads, so that a run that is training in
    `directory` is not disturbed. Raises `DamagedCheckpoint` if it is damaged.
    """
    wanted, remedy = {"params": shapes}, "take another step"
    return _read(directory, step, wanted, remedy, partial_restore=True)[0]["params"]


def _read(
    directory: Path,
    step: int,
    shapes: Tree,
    remedy: str,
    run_on_all: Callable[..., Any] | None = None,
    partial_restore: bool = False,
) -> tuple[Tree, dict[str, Any]]:
    """Return arrays of a checkpoint that are what was saved, and its JSON."""
    folder = (directory / "checkpoints" / str(step)).absolute()

    def read() -> tuple[Tree, dict[str, Any]]:
        tree = _read_arrays(folder, shapes, partial_restore)
        try:
            return tree, read_meta(directory, step)
        except DamagedCheckpoint as error:
            raise UsageError(error.reason) from None

    try:
        tree, meta = run_on_all(read) if run_on_all else read()
    except UsageError as error:
        raise DamagedCheckpoint(str(error), remedy) from error
    found, saved = checksums(tree), meta["checksums"]
    differ = [path for path in found if found[path] != saved.get(path)]
    if differ:
        raise DamagedCheckpoint(
            f"{folder}: {differ[0]} is not what was saved, by its checksum ({len(differ)} of "
            f"{len(found)} arrays)",
            f"try again, or {remedy}",
        )
    return tree, meta


def _read_arrays(folder: Path, shapes: Tree, partial_restore: bool) -> Tree:
    """Return this process's part of the arrays; `UsageError` if they cannot be read.

    By Orbax's handler, which waits for no other process: a process that fails can say so.
    """
    import orbax.checkpoint as ocp

    silence_orbax()
    args = ocp.args.PyTreeRestore(
        shapes,
        restore_args=ocp.checkpoint_utils.construct_restore_args(shapes),
        partial_restore=partial_restore,
    )
    try:
        with contextlib.closing(ocp.PyTreeCheckpointHandler()) as handler:
            return handler.restore(folder / "state", args=args)
    except Exception as error:  # Orbax and TensorStore have many, and bare ones
        cause = error.__cause__ or error
        if isinstance(cause, MemoryError | jax.errors.JaxRuntimeError):  # of devices, not of files
            raise RuntimeError(f"{folder}: not restored") from error
        reason = " ".join(str(cause).split())[:200]
        raise UsageError(f"{folder}: cannot be restored ({reason})") from error


@contextlib.contextmanager
def _no_room_is_usage_error(folder: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # TensorStore's are ValueErrors
        reason = next((words for words in NO_ROOM_WORDS if words in str(error)), None)
        if reason is None:
            raise
        raise UsageError(
            f"{folder}: a checkpoint could not be written ({reason}); {MAKE_ROOM}"
        ) from error


@functools.cache
def silence_orbax() -> None:
    """Silence Orbax, which logs each save, and each error beside raising it.

    When one array fails, it closes the event loop that the others still use. They fail where no
    caller can catch it, and only this hook of Python's can leave out their tracebacks.
    """
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        traceback = unraisable.exc_traceback
        module = traceback.tb_frame.f_globals["__name__"] if traceback else ""
        if module.partition(".")[0] not in ("asyncio", "orbax"):
            before(unraisable)

    sys.unraisablehook = hook
