"""Sharded checkpoints, written in the background. A checkpoint is either complete or absent."""

import contextlib
import functools
import logging
import os
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxgpt.checkpoint.checksums import checksums
from jaxgpt.checkpoint.local import local_folder
from jaxgpt.checkpoint.metadata import (
    ERRORS_OF_THE_FILE,
    TEMPORARY_SUFFIX,
    DamagedCheckpoint,
    add_checksum,
    describe_error,
    list_checkpoints,
    os_error,
    read_meta,
    remove_temporary,
)
from jaxgpt.checkpoint.retention import steps_to_remove
from jaxgpt.cluster.process_group import ProcessGroup
from jaxgpt.config import Config, UsageError, should_run_every
from jaxgpt.parallel.sharding import Params
from jaxgpt.tracking.jsonl import NO_ROOM
from jaxgpt.tracking.records import CheckpointFailedRecord, CheckpointRecord, Record

Tree = dict[str, Any]  # nested dicts of arrays, or of `jax.ShapeDtypeStruct`s

TIMED_OUT = "not complete within checkpoint.timeout_minutes"
# Phrases in error messages that indicate a full disk. File systems report free space regardless of
# quotas, so an exhausted quota shows up only in these errors.
NO_ROOM_WORDS = ("are free there", *map(os.strerror, NO_ROOM))
DATA_FILE_BYTES = 2**28  # Orbax writes several files in parallel; Orbax's default is 2 GiB
CONTINUE = (
    "start again with the same run directory to continue from the newest complete checkpoint, if "
    "there is one"
)


@dataclass
class Save:
    """A checkpoint that is being written or copied."""

    step: int
    began: float  # `time.perf_counter()` when training paused for the save
    stalled: float = 0.0  # duration of the pause in seconds
    error: Exception | None = None  # reason why this process failed to start the save
    copy: Future[None] | None = None  # copying to the run directory, on process 0 only
    # `time.perf_counter()` on process 0 when all arrays and metadata had been written or copied.
    # None means that this has not happened or is unknown.
    ended: float | None = None
    is_logged: bool = False


class Checkpoints:
    """Saves and restores the state of one run, in `directory`/checkpoints.

    Orbax writes in a background thread of each process, with barriers between the processes. If one
    process fails, the others wait at a barrier for at most checkpoint.timeout_minutes. During the
    next `save`, `restore` or `close`, the processes agree on whether Orbax succeeded. If
    checkpoint.local is set, Orbax writes to that folder, and process 0 then copies the checkpoint.

    The caller may set `log`. It is called with a record of each completed save and of each failed
    save that does not raise an error. Errors raised by `log` propagate.
    """

    def __init__(
        self,
        directory: Path,
        config: Config,
        cluster: ProcessGroup | None = None,
        on_saved: Callable[[float], None] = lambda seconds: None,
    ):
        """Initialize without reading or writing any file.

        Args:
            directory: the run directory, which all processes share.
            config: the configuration of the run.
            cluster: the processes that save together. None means only this process.
            on_saved: called on process 0 with the duration in seconds of each completed save.
        """
        self._directory, self._config = directory.absolute(), config
        self._cluster = cluster or ProcessGroup(launcher="none")
        self._on_saved = on_saved
        self._folder = self._directory / "checkpoints"
        self._local = local_folder(config, directory)
        self._writing: Save | None = None  # being written by Orbax
        self._copying: Save | None = None  # being copied from checkpoint.local
        self._leftovers: list[Path] = []  # left by failed saves; Orbax may still write there
        self._orbax: Any = None  # created by the first save, because importing Orbax takes a second
        # On process 0, one thread removes old checkpoints and copies local checkpoints.
        self._background: ThreadPoolExecutor | None = None
        self._last_save = time.monotonic()  # initially the start of the run
        self.log: Callable[[Record], None] = lambda record: None

    def open(self, tree: Tree) -> None:
        """Prepare for saving: remove interrupted saves, and create the local folder, if any.

        `tree` contains the arrays to save or their shapes. All processes must call this. Raises
        `UsageError` on every process if the run directory cannot be accessed or has too little
        space for a checkpoint.
        """
        if self._local is not None:
            self._local.open(self._cluster)
        if self._cluster.is_main:
            remove_temporary(self._folder)
        if problem := self._cluster.broadcast(self._room_problem(tree)):
            raise UsageError(f"{self._folder}: {problem}; {_remedy(problem)}")

    def is_due(self, step: int) -> bool:
        """Return whether checkpoint.interval or checkpoint.interval_minutes requires a save now.

        All processes must call this after each step. checkpoint.interval_minutes is checked
        only every train.log_interval steps, using the clock of process 0.
        """
        checkpoint, train = self._config.checkpoint, self._config.train
        if should_run_every(step, checkpoint.interval):
            return True
        if checkpoint.interval_minutes is None or not should_run_every(step, train.log_interval):
            return False
        minutes = (time.monotonic() - self._last_save) / 60
        return self._cluster.broadcast(minutes >= checkpoint.interval_minutes)

    def save(self, step: int, tree: Tree, meta: Mapping[str, Any]) -> None:
        """Start saving arrays and JSON. The caller may donate the arrays after this returns.

        This first waits for earlier saves, except for the copy of the previous checkpoint from
        checkpoint.local to the run directory. It then starts removing the checkpoints that the
        retention settings do not keep, and removes any existing checkpoint of this step. If
        checkpoint.local is set, the checkpoint of this step is removed only from there.

        If this save fails, the next `save`, `restore` or `close` reports the error. A failed copy
        may go unreported until the second `save` after this one. All processes must call this.

        Args:
            step: the step after which `tree` was computed.
            tree: the arrays, which must satisfy the conditions of `checksums`.
            meta: the JSON that `read_meta` describes, without `step`, `saved` and `checksums`.

        Raises:
            UsageError: on every process, if an earlier save has failed, and either
                checkpoint.on_error=stop is set or there is no complete checkpoint.
        """
        began = time.perf_counter()
        self._settle()
        self._remove_old()
        self._last_save = time.monotonic()
        self._writing = save = Save(step, began)
        if problem := self._cluster.broadcast(self._make_room(step, tree)):
            save.error = OSError(problem)
            return
        meta = {**meta, "step": step, "saved": time.time(), "checksums": checksums(tree)}
        meta = add_checksum(meta)
        try:
            self._save(step, tree, meta)
        except Exception as error:  # this process may be the only one that fails; see `_settle`
            save.error = error
        save.stalled = time.perf_counter() - began

    def check(self) -> None:
        """On process 0, log newly completed checkpoints, and start copying local checkpoints.

        On other processes, do nothing.
        """
        if not self._cluster.is_main:
            return
        for save in (self._copying, self._writing):
            if save is None or save.is_logged or save.error is not None:
                continue
            if save.copy is not None:
                if save.copy.done() and save.copy.exception() is None:
                    self._log_complete(save)
            elif os.path.exists(self._path(save.step)):  # False if the file system is unavailable
                if self._local is None:
                    self._log_complete(save)
                else:
                    self._start_copy(save)

    def restore(self, step: int, shapes: Tree) -> tuple[Tree, dict[str, Any]]:
        """Restore a checkpoint bit for bit. Return its arrays and its JSON (see `read_meta`).

        This first waits for saves in progress. All processes must call this.

        Args:
            shapes: tree of `jax.ShapeDtypeStruct`s that match the saved arrays and have the target
                shardings.

        Raises:
            DamagedCheckpoint: on every process, if any process finds damaged or missing files, or
                arrays that do not match `shapes`.
            UsageError: on every process, if a save in progress fails and the run cannot continue
                without it.
        """
        self._settle_all()
        remedy = "remove it to continue from an older checkpoint, if there is one"
        return _read(self._directory, step, shapes, remedy, self._cluster)

    def remove_local_after(self, step: int) -> None:
        """Remove local checkpoints newer than `step`, which a restart has abandoned.

        Does nothing if checkpoint.local is not set. Errors during the removal are ignored. Call
        this only on process 0.
        """
        if self._local is not None:
            for later in list_checkpoints(self._local.directory):
                if later > step:
                    self._local.remove(later)

    def newest_complete(self) -> int | None:
        """Wait for all saves. Return the step of the newest checkpoint, or None if there is none.

        An unreadable folder of checkpoints counts as empty. All processes must call this. Raises
        `UsageError` on every process under the same conditions as `save`.
        """
        self._settle_all()
        return self._newest_complete()

    def close(self, is_final: bool = True) -> None:
        """Wait for all saves, and remove the checkpoints that the retention settings do not keep.

        All processes must call this. If `is_final`, the newest save is the run's last. Raises
        `UsageError` on every process under the same conditions as `save`, and if the run's last
        save failed.
        """
        try:
            self._settle_all(is_final)
            self._remove_old()
        finally:
            if self._orbax is not None:
                self._orbax.close()
                self._orbax = None
            if self._background is not None:
                self._background.shutdown()
                self._background = None

    def _save(self, step: int, tree: Tree, meta: Mapping[str, Any]) -> None:
        import orbax.checkpoint as ocp

        if self._orbax is None:
            silence_orbax()
            handler = ocp.CompositeCheckpointHandler(
                # Compression would take longer than writing, and save only 8 to 9% of the space.
                state=ocp.PyTreeCheckpointHandler(use_compression=False),
                meta=ocp.JsonCheckpointHandler(),
            )
            seconds = max(1, round(60 * self._config.checkpoint.timeout_minutes))
            # If Orbax fails to create a folder in the background, its other threads wait until the
            # timeout, and a single-process run cannot exit before then.
            options = ocp.AsyncOptions(
                timeout_secs=seconds,
                post_finalization_callback=self._note_end,
                create_directories_asynchronously=self._cluster.size > 1,
            )
            self._orbax = ocp.AsyncCheckpointer(handler, async_options=options)
        args = ocp.args.Composite(
            state=ocp.args.PyTreeSave(tree, ocdbt_target_data_file_size=DATA_FILE_BYTES),
            meta=ocp.args.JsonSave(meta),
        )
        self._orbax.save(self._path(step), args=args)

    def _path(self, step: int) -> Path:
        """Return the folder that Orbax writes a checkpoint to."""
        directory = self._directory if self._local is None else self._local.directory
        return directory / "checkpoints" / str(step)

    def _room_problem(self, tree: Tree) -> str:
        """Return an error message if a checkpoint may not fit into the run directory, else ""."""
        needed = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(tree))
        try:
            disk = shutil.disk_usage(self._directory)
        except OSError as error:
            return error.strerror or str(error)
        if not disk.total or needed <= disk.free:  # some file systems report a size of 0
            return ""
        return (
            f"a checkpoint takes {needed / 1e6:,.1f} MB, but only {disk.free / 1e6:,.1f} MB are "
            "free there"
        )

    def _make_room(self, step: int, tree: Tree) -> str:
        """On process 0, make room for a save. Return an error message if this fails, else ""."""
        if not self._cluster.is_main:
            return ""
        while self._leftovers:
            shutil.rmtree(self._leftovers.pop(), ignore_errors=True)
        try:
            if self._path(step).exists():  # damaged: the run restarted from an older checkpoint
                shutil.rmtree(self._path(step))
        except OSError as error:
            return f"{self._path(step)} cannot be removed: {describe_error(error)}"
        problem = self._room_problem(tree)
        if problem and self._background is not None:  # wait for the removal of old checkpoints
            self._background.shutdown()
            self._background = None
            problem = self._room_problem(tree)
        return problem

    def _settle(self, is_final: bool = False) -> None:
        """Wait for any save and copy in progress. All processes agree on the outcome.

        If a local checkpoint has been written, this starts copying it.
        """
        writing, copying = self._writing, self._copying
        errors = [
            "" if writing is None else self._wait_for_orbax(writing),
            "" if copying is None else _wait_for_copy(copying),
        ]
        by_process = self._cluster.allgather(errors)
        failed_write, failed_copy = (_first_cause([e[i] for e in by_process]) for i in (0, 1))
        self._writing = self._copying = None
        if copying is not None:
            if failed_copy:
                self._fail(copying.step, failed_copy, is_final and writing is None)
            else:
                self._log_complete(copying)
        if writing is not None:
            if failed_write:
                self._fail(writing.step, failed_write, is_final)
            elif self._local is None:
                self._log_complete(writing)
            else:
                self._copying = writing
                if self._cluster.is_main and writing.copy is None:
                    self._start_copy(writing)

    def _settle_all(self, is_final: bool = False) -> None:
        """Wait for all saves and copies to finish."""
        self._settle(is_final)
        self._settle(is_final)  # waits for the copy that the first call started

    def _wait_for_orbax(self, save: Save) -> str:
        error = save.error
        try:
            if self._orbax is not None:
                self._orbax.wait_until_finished()
        except Exception as raised:  # Orbax and TensorStore raise many types of exceptions
            error = error or raised
        if isinstance(error, TimeoutError):
            return f"{TIMED_OUT}={self._config.checkpoint.timeout_minutes:g}"
        return "" if error is None else describe_error(error)

    def _note_end(self) -> None:
        """Note the time. Orbax calls this on process 0 before it renames the checkpoint."""
        if self._writing is not None:
            self._writing.ended = time.perf_counter()

    def _start_copy(self, save: Save) -> None:
        save.copy = self._in_background(self._copy, save)

    def _copy(self, save: Save) -> None:
        self._local.copy_to_run(save.step)
        save.ended = time.perf_counter()

    def _in_background(self, function: Callable[..., None], *arguments: Any) -> Future[None]:
        self._background = self._background or ThreadPoolExecutor(1, "checkpoints")
        return self._background.submit(function, *arguments)

    def _log_complete(self, save: Save) -> None:
        if save.is_logged:
            return
        save.is_logged = True
        # The save may have finished long ago, for example before an evaluation.
        ended = save.ended or time.perf_counter()
        seconds = max(save.stalled, ended - save.began)
        if self._cluster.is_main:
            self._on_saved(seconds)
        self.log(
            CheckpointRecord(
                step=save.step, path=str(self._folder / str(save.step)), stalled=save.stalled,
                seconds=seconds,
            )
        )  # fmt: skip

    def _fail(self, step: int, error: str, is_last: bool = False) -> None:
        """Log a failed save, or raise `UsageError` if the run cannot continue without it."""
        if self._cluster.is_main:
            for directory in {self._path(step).parent, self._folder}:
                leftover = directory / f"{step}{TEMPORARY_SUFFIX}"
                shutil.rmtree(leftover, ignore_errors=True)
                self._leftovers.append(leftover)  # the next save tries again
        latest = self._newest_complete()
        sentence = f"{self._folder}: checkpoint {step} could not be written ({error})"
        if is_last or latest is None or self._config.checkpoint.on_error == "stop":
            raise UsageError(f"{sentence}; {_remedy(error)}")
        self.log(CheckpointFailedRecord(step=step, reason=sentence, latest_complete=latest))

    def _newest_complete(self) -> int | None:
        latest = None
        if self._cluster.is_main:
            with contextlib.suppress(UsageError):  # treat an unreadable folder as empty
                latest = max(list_checkpoints(self._directory), default=None)
        return self._cluster.broadcast(latest)

    def _remove_old(self) -> None:
        """Start removing the checkpoints that the retention settings do not keep."""
        if not self._cluster.is_main:
            return
        with contextlib.suppress(OSError, UsageError):  # the next save tries again
            saved = list_checkpoints(self._directory)
            for step in steps_to_remove(self._directory, self._config, saved):
                # Rename first, so that an interrupted removal does not leave half a checkpoint.
                path = self._folder / str(step)
                scratch = path.rename(f"{path}{TEMPORARY_SUFFIX}")
                self._in_background(shutil.rmtree, scratch, True)


def _remedy(problem: str) -> str:
    """Return advice for a checkpoint that cannot be written."""
    room = "make room, and " if any(words in problem for words in NO_ROOM_WORDS) else ""
    return f"{room}{CONTINUE}"


def _wait_for_copy(save: Save) -> str:
    error = save.copy.exception() if save.copy is not None else None
    return "" if error is None else describe_error(error)


def _first_cause(errors: list[str]) -> str:
    """Return the cause of a failed save, or "" if no process failed.

    `errors` has one message per process, which is empty if the process did not fail. Processes that
    waited at Orbax's barriers for the failed process report timeouts.
    """
    found = [(rank, error) for rank, error in enumerate(errors) if error]
    causes = [pair for pair in found if not pair[1].startswith(TIMED_OUT)] or found
    if not causes:
        return ""
    rank, error = causes[0]
    return error if len(errors) == 1 else f"process {rank}: {error}"


def restore_params(
    directory: Path, step: int, shapes: Params, cluster: ProcessGroup | None = None
) -> Params:
    """Return only the parameters of a checkpoint, with the shardings of `shapes`.

    Every process with a device that holds parameters must call this, and all processes of `cluster`
    if it is given. This writes nothing, so a run may be training in `directory` at the same time.

    Args:
        directory: a run directory, or the output of jaxgpt.convert.
        shapes: tree of `jax.ShapeDtypeStruct`s that match the saved arrays and have the target
            shardings: `NamedSharding`s on one mesh. The tree may leave out arrays.
        cluster: the processes that all raise an error if one of them finds one. None means only
            this process, which may then miss errors that occur only on other processes.

    Raises:
        DamagedCheckpoint: if any process finds damaged or missing files, or arrays that do not
            match `shapes`.
    """
    wanted = {"params": shapes}
    remedy = "choose another step, or try again if a run is replacing its checkpoints"
    cluster = cluster or ProcessGroup(launcher="none")
    return _read(directory, step, wanted, remedy, cluster, partial_restore=True)[0]["params"]


def _read(
    directory: Path,
    step: int,
    shapes: Tree,
    remedy: str,
    cluster: ProcessGroup,
    partial_restore: bool = False,
) -> tuple[Tree, dict[str, Any]]:
    """Read a checkpoint and verify its checksums. Return its arrays and its JSON.

    Raises `DamagedCheckpoint` if any process finds damaged or missing files, or arrays that do not
    match `shapes`.
    """
    folder = (directory / "checkpoints" / str(step)).absolute()

    def read() -> tuple[Tree, dict[str, Any], str]:
        try:
            return _read_arrays(folder, shapes, partial_restore), read_meta(directory, step), ""
        except DamagedCheckpoint as error:  # `run_on_all` would raise a plain `UsageError`
            return {}, {}, error.reason

    tree, meta, damage = cluster.run_on_all(read)
    if reasons := [reason for reason in cluster.allgather(damage) if reason]:
        raise DamagedCheckpoint(reasons[0], remedy)
    found, saved = checksums(tree), meta["checksums"]
    differ = [path for path in found if found[path] != saved.get(path)]
    if differ:
        raise DamagedCheckpoint(
            f"{folder}: {differ[0]} does not match its checksum ({len(differ)} of {len(found)} "
            "arrays)",
            f"try again, or {remedy}",
        )
    return tree, meta


def _read_arrays(folder: Path, shapes: Tree, partial_restore: bool) -> Tree:
    """Return this process's shards of the arrays.

    Raises `DamagedCheckpoint` if an array is missing or damaged, `UsageError` if a file cannot be
    read, and `RuntimeError` if JAX fails.

    This function calls Orbax's handler directly. The handler does not wait for other processes, so
    a failed process can report its error to them.
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
            found = handler.restore(folder / "state", args=args)
    except Exception as error:  # Orbax and TensorStore raise many types of exceptions
        cause = error.__cause__ or error
        if isinstance(cause, KeyboardInterrupt):  # not a sign of damage
            raise cause from None
        if isinstance(cause, MemoryError | jax.errors.JaxRuntimeError):  # not caused by the files
            raise RuntimeError(f"{folder}: could not be restored") from error
        text = " ".join(str(cause).split())
        number = os_error(cause)
        if number not in (None, *ERRORS_OF_THE_FILE):
            problem = os.strerror(number)
            raise UsageError(f"{folder}: cannot be read now ({problem}); try again") from error
        raise DamagedCheckpoint(f"{folder}: cannot be restored ({text[:200]})", "") from error
    for path, array in jax.tree_util.tree_leaves_with_path(found):
        if isinstance(array, jax.ShapeDtypeStruct):  # Orbax returns the shape if there is no array
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise DamagedCheckpoint(f"{folder}: has no {name}", "")
    return found


@functools.cache
def silence_orbax() -> None:
    """Silence Orbax, which logs every save and every error that it raises.

    This affects the whole process: it limits the absl and asyncio loggers to critical messages,
    silences one warning, and replaces `sys.unraisablehook`.

    If Orbax fails to read or write an array, it closes the event loop that other arrays still use,
    and some coroutines are never awaited. Only `sys.unraisablehook` can suppress their tracebacks.
    """
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        traceback = unraisable.exc_traceback
        module = traceback.tb_frame.f_globals["__name__"] if traceback else ""
        if module.partition(".")[0] not in ("asyncio", "orbax"):
            before(unraisable)

    sys.unraisablehook = hook
