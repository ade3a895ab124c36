"""One checkpoint on its way to the disk, in a thread of each process, while training goes on.

No process waits for another in its main thread, and none writes what others may not be able to:
each says how its part went, and process 0 says what became of the whole.
"""

import contextlib
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxgpt.checkpoint.metadata import list_checkpoints
from jaxgpt.checkpoint.stage import Stage, copy_files
from jaxgpt.checkpoint.writer import (
    SCRATCH_SUFFIX,
    Piece,
    Tree,
    make_folder,
    merge_parts,
    publish,
    write_json,
    write_names,
    write_part,
)
from jaxgpt.runtime.jax_internals import key_value_store


class Verdict(NamedTuple):
    """What became of a checkpoint, the same on all processes."""

    error: str = ""  # why it is not complete
    standing: int | None = None  # then the newest one that is
    keys: Sequence[int] = ()  # of each process's part
    is_joined: bool = False  # whether the parts are one checkpoint in the stage


class Content(NamedTuple):
    """What is written."""

    step: int
    pieces: Sequence[Piece]
    names: Tree
    meta: Mapping[str, Any]


class Save:
    """Writes a checkpoint, if need be by way of the stage."""

    def __init__(
        self,
        number: int,
        directory: Path,
        stage: Stage | None,
        content: Content,
        began: float,
        check_room: Callable[[], None],
        previous: "Save | None",
    ):
        """Begin.

        Args:
            number: of this save among those of the job, the same on all processes.
            began: `time.perf_counter()` when it was due.
            check_room: called in the thread before anything is written; may raise `OSError`.
            previous: the save before this one, which is copied from the stage first.
        """
        self.step, self.verdict, self.seconds = content.step, Verdict(), 0.0
        self._began, self.stalled = began, time.perf_counter() - began  # seconds of training
        self._number, self._directory, self._stage = number, directory, stage
        self._content, self._check_room, self._previous = content, check_room, previous
        self._rank, self._store = jax.process_index(), key_value_store()
        self._written = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"save {self.step}")
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def wait_until_written(self) -> None:
        """Wait until nothing of it is in the host's memory any more."""
        self._written.wait()

    def wait(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        try:
            verdict = self._agree("written", self._write, self._join_parts)
            self._content = self._content._replace(pieces=(), names={})
            self._written.set()
            if self._stage is not None and verdict.error:
                shutil.rmtree(self._scratch(self._stage.directory), ignore_errors=True)
            elif self._stage is not None:
                verdict = self._copy(verdict)
        except Exception as error:  # of the store: process 0 is gone, which ends this one, too
            verdict = Verdict(reason(error))
        self._written.set()
        self.verdict, self.seconds = verdict, time.perf_counter() - self._began
        self._previous = None

    def _agree(
        self, what: str, do: Callable[[], int], conclude: Callable[[list[int]], Verdict]
    ) -> Verdict:
        """Do this process's part, which returns a number; return what process 0 makes of all."""
        try:
            mine = [do(), ""]
        except Exception as error:  # TensorStore's are ValueErrors
            mine = [0, reason(error)]
        if self._store is None:
            return self._conclude([mine], conclude)
        key = f"jaxgpt/save/{self._number}"
        self._store.set(f"{key}/{what}/{self._rank}", json.dumps(mine))
        if self._rank == 0:
            n = jax.process_count()
            parts = [json.loads(self._store.get(f"{key}/{what}/{r}")) for r in range(n)]
            # All have begun this save, and so have read what became of the one before the last.
            self._store.delete(f"jaxgpt/save/{self._number - 2}")
            verdict = self._conclude(parts, conclude)
            self._store.set(f"{key}/{what}/verdict", json.dumps(verdict))
        return Verdict(*json.loads(self._store.get(f"{key}/{what}/verdict")))

    def _conclude(self, parts: list[Any], conclude: Callable[[list[int]], Verdict]) -> Verdict:
        """Complete the checkpoint of all parts, or remove them; on process 0."""
        many = len(parts) > 1
        failed = [f"process {rank}: {e}" if many else e for rank, (_, e) in enumerate(parts) if e]
        try:
            if not failed:
                return conclude([number for number, _ in parts])
        except Exception as error:
            failed = [reason(error)]
        shutil.rmtree(self._scratch(self._directory), ignore_errors=True)
        standing = None
        with contextlib.suppress(OSError):  # the folder may be out of reach
            standing = max(list_checkpoints(self._directory), default=None)
        return Verdict(failed[0], standing)

    def _write(self) -> int:
        self._check_room()
        folder = self._scratch(self._stage.directory if self._stage else self._directory)
        make_folder(folder)
        make_folder(folder / "state")
        if self._rank == 0:
            write_names(folder / "state", self._content.names)
        return write_part(folder / "state", self._rank, self._content.pieces)

    def _join_parts(self, keys: list[int]) -> Verdict:
        if self._stage is None:
            self._complete(self._directory, keys)
            return Verdict()
        is_joined = self._stage.has_parts(self._scratch(self._stage.directory) / "state", keys)
        if is_joined:
            self._complete(self._stage.directory, keys)
        return Verdict(keys=keys, is_joined=is_joined)

    def _complete(self, directory: Path, keys: Sequence[int]) -> None:
        """Join the parts, unless they are joined, and publish the checkpoint; on process 0."""
        folder = self._scratch(directory)
        if keys:
            merge_parts(folder / "state", keys)
            make_folder(folder / "meta")
            write_json(folder / "meta" / "metadata", self._content.meta)
        publish(folder)

    def _copy(self, written: Verdict) -> Verdict:
        """Copy what was written to the stage; the copies are made one after the other."""
        if self._previous is not None:
            self._previous.wait()
        stage, source = self._stage, self._scratch(self._stage.directory)
        if written.is_joined:
            source = source.with_name(str(self.step))

        def copy() -> int:
            copy_files(source, self._scratch(self._directory), self._rank)
            return 0

        def complete(_: list[int]) -> Verdict:
            self._complete(self._directory, () if written.is_joined else written.keys)
            if written.is_joined:
                stage.mark_copied(self.step)
            return Verdict()

        verdict = self._agree("copied", copy, complete)
        if not written.is_joined:
            shutil.rmtree(source, ignore_errors=True)  # all processes of a host at once
        return verdict

    def _scratch(self, directory: Path) -> Path:
        return directory / "checkpoints" / f"{self.step}{SCRATCH_SUFFIX}"


def reason(error: Exception) -> str:
    """Return an error in a few words: those of the system, where it is the system's.

    TensorStore's errors are `ValueError`s that end in `[OS error 5: EIO Input/output error]`, or
    `[os_error_code='5']`.
    """
    if number := os_error(error):
        return os.strerror(number)
    return (" ".join(str(error).split()) or type(error).__name__)[:200]


def os_error(error: BaseException) -> int | None:
    """Return the system's number of an error, of Python or of TensorStore; None if it has none."""
    found = re.search(r"\[(?:OS error |os_error_code=')(\d+)", str(error))
    return int(found[1]) if found else getattr(error, "errno", None)
