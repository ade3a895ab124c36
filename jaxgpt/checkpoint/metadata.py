"""The JSON beside the state of a checkpoint: what a run needs to go on from it."""

import contextlib
import errno
import hashlib
import itertools
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxgpt.config import UsageError, check_shape, in_words, read_json

TEMPORARY_SUFFIX = ".orbax-checkpoint-tmp"  # of a checkpoint that Orbax has not completed
CHECKSUM_KEY = "sha256"  # the key of the hash of everything else
# Errors about a file itself, not about the disk or the network that it is on.
ERRORS_OF_THE_FILE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EINVAL)
WEIGHTS_ONLY = "weights_only"  # the key that says that there is no state of an optimizer
SECTIONS = ("model", "train", "optimizer", "data", "parallel", "spike")
SHAPE = {
    "step": int, "config": dict.fromkeys(SECTIONS, dict), "checksums": {str: int},
    "data_fingerprint": [(str, str)], "tokenizer": dict | None, "jax": str, "source?": str,
    "corpus_tokens?": {str: int}, "spike_state?": dict, "init_from?": (str, int),
}  # fmt: skip
# What only a run has. `batch_sizes` are the changes of a `BatchSizes`.
RUN_SHAPE = {"mesh": str, "processes": int, "batch_sizes": [(int, int)]}


class DamagedCheckpoint(UsageError):
    """A checkpoint that cannot be read, or is not what was saved."""

    def __init__(self, reason: str, remedy: str):
        super().__init__(f"{reason}; {remedy}")
        self.reason = reason


def add_checksum(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return `meta` with a hash of itself, by which `read_meta` sees a change."""
    return {**meta, CHECKSUM_KEY: _hash(meta)}


def read_meta(directory: Path, step: int) -> dict[str, Any]:
    """Return the JSON that was saved beside the state of `step` in a run directory.

    Raises `DamagedCheckpoint` if it is not there or has changed, `UsageError` if it cannot be read
    now, or is that of another step.
    """
    checkpoint = directory / "checkpoints" / str(step)
    path = checkpoint / "meta" / "metadata"
    try:
        meta = read_json(path, {CHECKSUM_KEY: str})
        if meta.pop(CHECKSUM_KEY) != _hash(meta):
            raise ValueError(f"its {CHECKSUM_KEY} is not that of its content")
        check_shape(meta, SHAPE | ({} if meta.get(WEIGHTS_ONLY) else RUN_SHAPE))
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno not in ERRORS_OF_THE_FILE:
            raise UsageError(f"{path}: cannot be read now ({error.strerror}); try again") from None
        raise DamagedCheckpoint(
            f"{path}: is damaged ({in_words(error)})",
            f"remove {checkpoint} to continue from an older checkpoint, if there is one",
        ) from None
    if meta["step"] != step:
        raise UsageError(
            f"{checkpoint}: was saved after step {meta['step']}, says its metadata; give it that "
            "name, or remove it"
        )
    return meta


def quarantine(directory: Path, step: int, reason: str) -> dict[str, str]:
    """Rename a damaged checkpoint to STEP.damaged; return its new path and the reason.

    Raises `UsageError` if it cannot be renamed.
    """
    path = directory / "checkpoints" / f"{step}.damaged"
    for number in itertools.count(2):
        if not path.exists():
            break
        path = path.with_name(f"{step}.damaged.{number}")
    try:
        path.with_name(str(step)).rename(path)
    except OSError as error:
        raise UsageError(
            f"{reason}; {path.with_name(str(step))} cannot be renamed ({error.strerror or error}); "
            "remove it to continue from the checkpoint before it"
        ) from None
    return {"path": str(path), "reason": reason}


def newest_undamaged(
    directory: Path, on_damage: str, last: int | None = None
) -> tuple[int | None, dict[str, Any], dict[int, DamagedCheckpoint]]:
    """Return the step to resume from, its JSON, and the damaged checkpoints after it.

    That is judged by the JSON alone. The step is None if there is no checkpoint. Raises
    `DamagedCheckpoint` if there are damaged ones only, or one with checkpoint.on_damage=refuse.
    Checkpoints after the step `last` do not count.
    """
    damaged: dict[int, DamagedCheckpoint] = {}
    steps = list_checkpoints(directory)
    for step in reversed([s for s in steps if last is None or s <= last]):
        try:
            meta = read_meta(directory, step)
        except DamagedCheckpoint as error:
            damaged[step] = error
            if on_damage == "refuse":
                break
        else:
            return step, meta, damaged
    if damaged:
        raise damaged[max(damaged)]
    return None, {}, {}


def valid_checkpoints(directory: Path) -> dict[int, dict[str, Any]]:
    """Return the JSON of each checkpoint in a run directory by step, without damaged ones.

    Raises `UsageError` if one cannot be read now.
    """
    found = {}
    for step in list_checkpoints(directory):
        with contextlib.suppress(DamagedCheckpoint):  # a restart quarantines it
            found[step] = read_meta(directory, step)
    return found


def list_checkpoints(directory: Path) -> list[int]:
    """Return the steps of the checkpoints in a run directory, oldest first.

    Damaged ones are among them, so that reading one reports it; those being written are not.
    """
    names = (path.name for path in (directory / "checkpoints").glob("*"))
    return sorted(int(name) for name in names if is_step(name))


def choose_checkpoint(run: Path, step: int | None) -> int:
    """Return `step`, or that of the newest checkpoint; `UsageError` if the run does not have it."""
    steps = list_checkpoints(run)
    if not steps:
        raise UsageError(f"--run {run}: has no checkpoints yet; give a run directory with one")
    if step is None:
        return steps[-1]
    if step not in steps:
        raise UsageError(f"--step {step}: {run} has {', '.join(map(str, steps))}")
    return step


def newest_checkpoint(directory: Path, key: str) -> tuple[int, dict[str, Any]]:
    """Return the step and the JSON of the newest checkpoint; errors call the folder by `key`."""
    steps = list_checkpoints(directory)
    if not steps:
        raise UsageError(
            f"{key}: has no checkpoint; give a run directory, or the --out of jaxgpt.convert"
        )
    return steps[-1], read_meta(directory, steps[-1])


def remove_temporary(checkpoints: Path) -> None:
    """Remove what interrupted saves and removals left in a folder of checkpoints."""
    for scratch in checkpoints.glob(f"*{TEMPORARY_SUFFIX}"):
        shutil.rmtree(scratch, ignore_errors=True)  # costs room only, and is tried again


def is_step(name: str) -> bool:
    """Return whether a checkpoint may have this name."""
    return name.isdecimal() and str(int(name)) == name


def _hash(meta: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest()


def reason(error: BaseException) -> str:
    """Return an error in a few words: those of the operating system if it has any."""
    if number := os_error(error):
        return os.strerror(number)
    return (" ".join(str(error).split()) or type(error).__name__)[:200]


def os_error(error: BaseException) -> int | None:
    """Return the error number of the operating system; None if there is none.

    TensorStore raises `ValueError`s that end in `[OS error 5: EIO Input/output error]`, or in
    `[os_error_code='5']`, and `shutil.Error` lists one `[Errno 5]` for each file.
    """
    found = re.search(r"\[(?:OS error |os_error_code='|Errno )(\d+)", str(error))
    return int(found[1]) if found else getattr(error, "errno", None)
