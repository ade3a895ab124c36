"""A folder of the node, such as its NVMe, that checkpoints are written to first."""

import contextlib
import hashlib
import os
import re
import shutil
import tempfile
from pathlib import Path

from jaxgpt.checkpoint.metadata import DamagedCheckpoint, list_checkpoints, read_meta
from jaxgpt.checkpoint.writer import PART, SCRATCH_SUFFIX, make_folder, publish, sync_folder
from jaxgpt.config import Config, UsageError, in_words
from jaxgpt.tracking.jsonl import LASTING, METRICS, read_records

COPIED = "copied"  # a file in a staged checkpoint that the run directory has, too, or had
BLOCK_BYTES = 2**24


class Stage:
    """The checkpoints of one run under checkpoint.stage, laid out as in its run directory.

    Each process writes its part here, then copies it to the run directory. Only where process 0
    sees the parts of all processes, as on one host or a burst buffer, is the staged checkpoint
    joined and restored from; else the parts go once they are copied.
    """

    def __init__(self, folder: str, directory: Path):
        run = str(directory.absolute())
        name = f"{directory.absolute().name}-{hashlib.sha256(run.encode()).hexdigest()[:8]}"
        self.directory = Path(folder).expanduser().absolute() / name
        self.checkpoints = self.directory / "checkpoints"

    def open(self) -> None:
        """Make the folder, without what an interrupted save left; `UsageError` if it cannot be."""
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.checkpoints).close()
        except OSError as error:
            raise UsageError(
                f"checkpoint.stage={self.directory.parent}: cannot be written on host "
                f"{os.uname().nodename} ({error.strerror}); give a folder that every host has"
            ) from None
        for scratch in self.checkpoints.glob(f"*{SCRATCH_SUFFIX}"):
            shutil.rmtree(scratch, ignore_errors=True)  # all processes of a host at once

    def has_parts(self, state: Path, keys: list[int]) -> bool:
        """Return whether this process sees the parts of all processes, with so many keys each."""
        return all((state / f"{PART}{rank}").is_dir() for rank, n in enumerate(keys) if n)

    def mark_copied(self, step: int) -> None:
        """Note that the run directory has a step; remove staged checkpoints of others it has."""
        (self.checkpoints / str(step) / COPIED).touch()
        for other in list_checkpoints(self.directory):
            path = self.checkpoints / str(other)
            if other < step or (other != step and (path / COPIED).exists()):
                shutil.rmtree(path, ignore_errors=True)

    def forget_later(self, step: int) -> None:
        """Remove the staged checkpoints of later steps."""
        for other in list_checkpoints(self.directory):
            if other > step:
                shutil.rmtree(self.checkpoints / str(other), ignore_errors=True)

    def recover(self, directory: Path, log_interval: int) -> list[str]:
        """Complete the copy of a checkpoint that was cut short; return lines for the log.

        Raises `UsageError` if it cannot be copied now: the run would go on from an older one.
        One that metrics.jsonl has not come to is left: the run has gone on on another node.
        """
        notes, there = [], list_checkpoints(directory)
        metrics = directory / METRICS
        records = read_records(metrics) if metrics.exists() else []
        known = max((r["step"] for r in records if r["kind"] not in LASTING), default=0)
        for step in list_checkpoints(self.directory):
            source = self.checkpoints / str(step)
            if (source / COPIED).exists():
                continue
            if max(there, default=-1) < step < known + log_interval:
                notes.append(self._copy_whole(step, directory))
            with contextlib.suppress(OSError):  # a stage that cannot be written; `open` says so
                self.mark_copied(step)
        return notes

    def _copy_whole(self, step: int, directory: Path) -> str:
        """Copy a checkpoint to the run directory, unless it is damaged; return a line to log."""
        scratch = directory / "checkpoints" / f"{step}{SCRATCH_SUFFIX}"
        try:
            read_meta(self.directory, step)
            shutil.rmtree(scratch, ignore_errors=True)
            copy_files(self.checkpoints / str(step), scratch)
            publish(scratch)
        except DamagedCheckpoint as error:
            return f"warning: checkpoint {step} is not copied from its stage: {error.reason}"
        except OSError as error:
            shutil.rmtree(scratch, ignore_errors=True)
            raise UsageError(
                f"{self.checkpoints / str(step)}: cannot be copied to {directory} "
                f"({in_words(error)}); make room there, or remove it to go on from an older one"
            ) from None
        return f"checkpoint {step}: copied from {self.directory}, its stage"


def stage_of_run(config: Config, directory: Path) -> Stage | None:
    """Return the stage of a run; None without checkpoint.stage."""
    stage = config.checkpoint.stage
    return None if stage is None else Stage(stage, directory)


def copy_files(source: Path, target: Path, rank: int | None = None) -> None:
    """Copy a checkpoint's files down to the disk: all, or those of one process.

    What belongs to no process's part is process 0's.
    """
    make_folder(target)
    folders = {target.parent, target}
    for path in sorted(source.rglob("*")):
        relative = path.relative_to(source)
        owner = re.search(rf"{PART}(\d+)", str(relative))
        is_wanted = rank is None or rank == (int(owner[1]) if owner else 0)
        if is_wanted and path.is_file() and path.name != COPIED:
            copy = target / relative
            for folder in reversed(copy.relative_to(target).parents):
                (target / folder).mkdir(exist_ok=True)
                folders.add(target / folder)
            _copy_file(path, copy)
    for folder in folders:
        sync_folder(folder)


def _copy_file(source: Path, target: Path) -> None:
    with source.open("rb") as read, target.open("wb") as write:
        shutil.copyfileobj(read, write, BLOCK_BYTES)
        write.flush()
        os.fsync(write.fileno())
