"""Local checkpoints, which are saved to fast storage and then copied to the run directory."""

import contextlib
import hashlib
import os
import shutil
import uuid
from pathlib import Path

from jaxgpt.checkpoint.metadata import (
    TEMPORARY_SUFFIX,
    DamagedCheckpoint,
    describe_error,
    list_checkpoints,
    read_meta,
    remove_temporary,
)
from jaxgpt.cluster.process_group import ProcessGroup
from jaxgpt.config import Config, UsageError, in_words
from jaxgpt.tracking.jsonl import METRICS, PERSISTENT_KINDS, read_records
from jaxgpt.tracking.starts import read_starts

BLOCK_BYTES = 2**24  # number of bytes copied at a time


class LocalFolder:
    """The local checkpoints of one run, in a folder with the same layout as the run directory.

    All processes share the folder, on a burst buffer or on the disk of a single host. A checkpoint
    is removed once process 0 has copied it or a later checkpoint to the run directory. A restart
    removes or renames the checkpoints that it abandons. Saving a step again replaces its
    checkpoint. The folder's name contains a hash of the run directory's path, so several runs can
    use the same checkpoint.local.
    """

    def __init__(self, folder: str, run: Path):
        run = run.absolute()
        digest = hashlib.sha256(str(run).encode()).hexdigest()[:8]
        self._folder, self._run = folder, run
        self.directory = Path(folder).absolute() / f"{run.name}-{digest}"

    def open(self, cluster: ProcessGroup) -> None:
        """Create the folder and remove interrupted saves. All processes must call this.

        Raises `UsageError` on every process if the folder is not writable or not visible to all
        processes.
        """
        checkpoints = self.directory / "checkpoints"
        probe = checkpoints / f".{cluster.broadcast(uuid.uuid4().hex)}"

        def create() -> None:
            try:
                checkpoints.mkdir(parents=True, exist_ok=True)
                probe.touch()
            except OSError as error:
                raise UsageError(
                    f"checkpoint.local={self._folder}: cannot be written ({in_words(error)}); give "
                    "a writable folder, or remove the setting"
                ) from None
            remove_temporary(checkpoints)

        def check_shared() -> None:
            if not os.path.exists(probe):  # `Path.exists` would raise `PermissionError`
                host = cluster.host_names[cluster.rank]
                raise UsageError(
                    f"checkpoint.local={self._folder}: host {host} cannot see the files that "
                    "process 0 writes there; give a folder that all hosts share, or remove the "
                    "setting"
                )

        cluster.run_on_main(create)
        cluster.run_on_all(check_shared)
        cluster.barrier()
        if cluster.is_main:
            probe.unlink()

    def recover(self, log_interval: int) -> list[str]:
        """Copy the remaining local checkpoints to the run directory. Return log lines.

        Local checkpoints that are already in the run directory are removed. Other checkpoints are
        copied, unless their JSON is damaged or a restart may have abandoned them. Abandoned
        checkpoints are renamed to STEP.stale. A checkpoint counts as abandoned in two cases: an
        earlier start that has trained began after the checkpoint was saved, or metrics.jsonl ends
        `log_interval` or more steps before the checkpoint (not counting `PERSISTENT_KINDS`). A
        missing metrics.jsonl counts as ending at step 0. There is one log line for each checkpoint
        that is copied, renamed or found to be damaged. Call this only on process 0. Raises
        `UsageError` if a checkpoint cannot be read, copied or renamed.
        """
        steps = list_checkpoints(self.directory)
        if not steps:
            return []
        notes, metrics = [], self._run / METRICS
        records = read_records(metrics) if metrics.exists() else []
        reached = max((r["step"] for r in records if r["kind"] not in PERSISTENT_KINDS), default=0)
        # A start recovers all local checkpoints before it trains, unless it has another
        # checkpoint.local or none.
        trained = (start["time"] for start in read_starts(self._run) if start["first_step"])
        newest_start = max(trained, default=0.0)
        for step in steps:
            path = self._path(step)
            try:
                if step in list_checkpoints(self._run):
                    self.remove(step)
                    continue
                abandoned, saved = "", read_meta(self.directory, step).get("saved")
                if step >= reached + log_interval:
                    abandoned = f"{METRICS} ends at step {reached}"
                elif saved is not None and saved < newest_start:
                    abandoned = "the run has since continued from an earlier step"
                if abandoned:
                    stale = path.with_name(f"{step}.stale")
                    shutil.rmtree(stale, ignore_errors=True)  # left by an earlier recovery
                    path.rename(stale)
                    notes.append(
                        f"warning: checkpoint {step} is not used, because {abandoned}; the "
                        f"checkpoint was renamed to {stale}"
                    )
                else:
                    self.copy_to_run(step)
                    notes.append(f"checkpoint {step}: copied from checkpoint.local={self._folder}")
            except DamagedCheckpoint as error:
                notes.append(f"warning: checkpoint {step} was not copied: {error.reason}")
            except OSError as error:
                raise UsageError(
                    f"{path}: cannot be copied to {self._run} ({describe_error(error)}); make room "
                    "there, or remove the checkpoint to continue from an older one"
                ) from None
        return notes

    def copy_to_run(self, step: int) -> None:
        """Copy a checkpoint atomically to the run directory.

        If this succeeds, remove the checkpoint and older checkpoints from the local folder. Raises
        `OSError` if the checkpoint cannot be copied, for example because the run directory already
        has a checkpoint of this step.
        """
        final = self._run / "checkpoints" / str(step)
        scratch = final.with_name(f"{step}{TEMPORARY_SUFFIX}")
        try:
            shutil.rmtree(scratch, ignore_errors=True)  # left by an earlier failure
            final.parent.mkdir(exist_ok=True)
            shutil.copytree(self._path(step), scratch, copy_function=_copy_to_disk)
            scratch.rename(final)
        except OSError:
            shutil.rmtree(scratch, ignore_errors=True)  # the disk may be full or gone
            raise
        for older in list_checkpoints(self.directory):
            if older <= step:  # an older checkpoint remains if copying it failed
                self.remove(older)

    def remove(self, step: int) -> None:
        """Remove a checkpoint from the local folder, ignoring errors."""
        with contextlib.suppress(OSError):  # harmless: `recover` tries again
            shutil.rmtree(self._path(step))

    def _path(self, step: int) -> Path:
        return self.directory / "checkpoints" / str(step)


def _copy_to_disk(source: str, target: str) -> None:
    """Copy a file and flush it to disk, because the source is removed afterwards."""
    with open(source, "rb") as read, open(target, "wb") as write:
        shutil.copyfileobj(read, write, BLOCK_BYTES)
        write.flush()
        os.fsync(write.fileno())


def local_folder(config: Config, run: Path) -> LocalFolder | None:
    """Return the local folder of a run, or None if checkpoint.local is not set."""
    return None if config.checkpoint.local is None else LocalFolder(config.checkpoint.local, run)
