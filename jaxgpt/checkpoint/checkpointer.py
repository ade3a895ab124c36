"""The checkpoints of a run: sharded, written in the background, complete or not there."""

import contextlib
import functools
import itertools
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from jaxgpt.checkpoint.checksums import checksums
from jaxgpt.checkpoint.metadata import (
    OF_THE_FILE,
    DamagedCheckpoint,
    add_checksum,
    list_checkpoints,
    read_meta,
)
from jaxgpt.checkpoint.save import Content, Save, os_error
from jaxgpt.checkpoint.schedule import SaveClock, steps_to_remove
from jaxgpt.checkpoint.stage import stage_of_run
from jaxgpt.checkpoint.writer import SCRATCH_SUFFIX, Tree, copy_to_host
from jaxgpt.config import Config, UsageError, should_run_every
from jaxgpt.parallel.sharding import Params
from jaxgpt.tracking.jsonl import NO_ROOM
from jaxgpt.tracking.records import (
    CheckpointFailedRecord,
    CheckpointRecord,
    Record,
    StagedRestoreRecord,
)

# Quotas show in these errors only, not in the room that a file system says it has.
NO_ROOM_WORDS = ("are free there", *map(os.strerror, NO_ROOM))
GO_ON = "start again with the same --out to go on from the newest complete one, if any"


class Checkpoints:
    """Saves and restores the state of one run, in `directory`/checkpoints.

    What does not stay (`schedule.py`) is removed once the next checkpoint after it is complete:
    when that is waited for, before the next save or at the end.
    """

    _numbers = itertools.count()  # of saves in this job, for messages between its processes

    def __init__(
        self,
        directory: Path,
        config: Config,
        on_saved: Callable[[float], None] = lambda seconds: None,
    ):
        """`on_saved` is given the seconds that a checkpoint took."""
        self._on_saved = on_saved
        self._directory, self._config = directory.absolute(), config
        self._folder = self._directory / "checkpoints"
        self._stage = stage_of_run(config, directory)
        self._saves: list[Save] = []  # under way
        self._removals: list[threading.Thread] = []
        self._clock = SaveClock(config.checkpoint.interval_minutes)
        self.log: Callable[[Record], None] = lambda record: None

    def open(self, tree: Tree) -> None:
        """Prepare to save: remove what an interrupted save left.

        All processes call this before any of them saves. Raises `UsageError` if the file system
        says that it has no room for a checkpoint, or checkpoint.stage cannot be written.
        """
        if self._stage is not None:
            self._stage.open()
        if jax.process_index() == 0:
            for scratch in self._folder.glob(f"*{SCRATCH_SUFFIX}"):
                shutil.rmtree(scratch, ignore_errors=True)
        if problem := self._room_problem(tree):
            raise UsageError(f"{self._folder}: {problem}; make room, and {GO_ON}")

    def _room_problem(self, tree: Tree) -> str:
        needed = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(tree))
        disk = shutil.disk_usage(self._directory)
        if not disk.total or needed <= disk.free:
            return ""
        return (
            f"a checkpoint takes {needed / 1e6:,.1f} MB, and {disk.free / 1e6:,.1f} MB are free "
            "there"
        )

    def is_due(self, step: int) -> bool:
        """Return whether checkpoint.interval or interval_minutes asks for a save after this step.

        All processes call this once a step, and get the same answer.
        """
        by_clock = self._clock.is_due()
        return by_clock or should_run_every(step, self._config.checkpoint.interval)

    def save(self, step: int, tree: Tree, meta: Mapping[str, Any]) -> None:
        """Start writing arrays and JSON; the arrays may be donated as soon as this returns.

        Raises what `check` does.
        """
        began = time.perf_counter()
        self._wait(allowed=0 if self._stage is None else 1)
        for save in self._saves:
            save.wait_until_written()
        self._remove_old()
        self._wait_for_removals()  # which make room
        self._clock.saved()
        meta = add_checksum({**meta, "step": step, "checksums": checksums(tree)})
        names = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), tree)

        def check_room() -> None:
            if jax.process_index() == 0 and (problem := self._room_problem(names)):
                raise OSError(problem)

        content = Content(step, copy_to_host(tree), names, meta)
        previous = self._saves[-1] if self._saves else None
        number = next(self._numbers)
        self._saves.append(
            Save(number, self._directory, self._stage, content, began, check_room, previous)
        )

    def check(self) -> None:
        """Log the checkpoints that are complete now, and those that failed.

        Raises `UsageError` if one has failed and the run cannot go on without it: with
        checkpoint.on_error=stop, or as there is no other. All processes do.
        """
        while self._saves and self._saves[0].is_done:
            self._settle(self._saves.pop(0))

    def _wait(self, allowed: int) -> None:
        """Wait until no more than `allowed` saves are under way."""
        while len(self._saves) > allowed:
            self._saves[0].wait()
            self._settle(self._saves.pop(0))

    def _settle(self, save: Save, is_last: bool = False) -> None:
        step, error, standing = save.step, save.verdict.error, save.verdict.standing
        if not error:
            path = str(self._folder / str(step))
            self._on_saved(save.seconds)
            self.log(
                CheckpointRecord(step=step, path=path, stalled=save.stalled, seconds=save.seconds)
            )
            return
        sentence = f"{self._folder}: checkpoint {step} could not be written ({error})"
        if is_last or standing is None or self._config.checkpoint.on_error == "stop":
            room = "make room, and " if any(words in error for words in NO_ROOM_WORDS) else ""
            raise UsageError(f"{sentence}; {room}{GO_ON}")
        self.log(CheckpointFailedRecord(step=step, reason=sentence, standing=standing))

    def _remove_old(self) -> None:
        if jax.process_index():
            return
        with contextlib.suppress(OSError):  # what cannot be removed now is there the next time
            saved = list_checkpoints(self._directory)
            for step in steps_to_remove(self._directory, self._config, saved):
                # Under another name it is no checkpoint, however little of it is left.
                path = self._folder / str(step)
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

        They come from the stage, if all processes find the checkpoint there, undamaged.

        Args:
            shapes: `jax.ShapeDtypeStruct`s with shardings.
            run_on_all: `ProcessGroup.run_on_all`, of a job of several processes.

        Raises:
            DamagedCheckpoint: on every process, if one of them finds the checkpoint damaged.
        """
        self._wait(allowed=0)
        if self._stage is not None:
            staged, original = self._stage.directory, self._directory
            with contextlib.suppress(UsageError):  # on all processes
                found = _read(staged, step, shapes, "", run_on_all, original=original)
                self.log(StagedRestoreRecord(step=step, path=str(staged)))
                return found
        remedy = "remove it to go on from an older checkpoint, if there is one"
        return _read(self._directory, step, shapes, remedy, run_on_all)

    def forget_later(self, step: int | None) -> None:
        """Remove what the stage has of later steps, which the run has gone back before."""
        if self._stage is not None and jax.process_index() == 0:
            self._stage.forget_later(-1 if step is None else step)

    def close(self, is_final: bool = True) -> None:
        """Wait until everything is on the disk.

        Raises what `check` does, and `UsageError` if the last save failed and `is_final`: no other
        save is going to follow.
        """
        saves, self._saves = self._saves, []
        try:
            for save in saves:
                save.wait()
            for save in saves:
                self._settle(save, is_final and save is saves[-1])
        finally:
            self._remove_old()
            self._wait_for_removals()


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
    original: Path | None = None,
) -> tuple[Tree, dict[str, Any]]:
    """Return arrays of a checkpoint that are what was saved, and its JSON.

    With an `original` the checkpoint has to be a copy of that one of this other directory.
    Raises `DamagedCheckpoint`, or `UsageError` where a disk or a network gives no answer.
    """
    folder = (directory / "checkpoints" / str(step)).absolute()
    run_on_all = run_on_all or (lambda function: function())
    damage: list[str] = []  # found by this process

    def read() -> tuple[Tree, dict[str, Any]]:
        try:
            if original is not None and read_meta(original, step) != read_meta(directory, step):
                raise DamagedCheckpoint(f"{folder}: is not a copy of that in {original}", "")
            return _read_arrays(folder, shapes, partial_restore), read_meta(directory, step)
        except DamagedCheckpoint as error:
            damage.append(error.reason)
            return {}, {}

    def raise_damage() -> None:
        if damage:
            raise UsageError(damage[0])

    tree, meta = run_on_all(read)
    try:
        run_on_all(raise_damage)
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
    """Return this process's part of the arrays.

    Raises `DamagedCheckpoint` if they are not all there, `UsageError` if they cannot be read now.
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
        text = " ".join(str(cause).split())
        if problem := _passing_problem(cause):
            raise UsageError(f"{folder}: cannot be read now ({problem}); try again") from error
        raise DamagedCheckpoint(f"{folder}: cannot be restored ({text[:200]})", "") from error


def _passing_problem(error: BaseException) -> str:
    """Return what keeps a sound file from being read; empty if it is the file itself."""
    number = os_error(error)
    return "" if number in (None, *OF_THE_FILE) else os.strerror(number)


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
