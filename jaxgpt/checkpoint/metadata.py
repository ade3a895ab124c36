"""The JSON in a checkpoint, and the checkpoints in a run directory."""

import contextlib
import errno
import glob
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

TEMPORARY_SUFFIX = ".orbax-checkpoint-tmp"  # marks incomplete checkpoints
CHECKSUM_KEY = "sha256"  # hash of all other keys and values
# Errors caused by the file itself, not by the disk or the network.
ERRORS_OF_THE_FILE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EINVAL)
WEIGHTS_ONLY = "weights_only"  # marks checkpoints without optimizer state
SECTIONS = ("model", "train", "optimizer", "data", "parallel", "checkpoint", "spike")
SHAPE = {
    "step": int, "config": dict.fromkeys(SECTIONS, dict), "checksums": {str: int},
    "data_fingerprint": [(str, str)], "tokenizer": dict | None, "jax": str, "source?": str,
    "corpus_tokens?": {str: int}, "spike_state?": dict, "init_from?": (str, int),
    "failure?": str,  # why the run failed at this step; missing if it did not fail
    "saved?": float,  # Unix time on process 0
}  # fmt: skip
# Additional keys in a run's checkpoints. `batch_sizes` has the format of `BatchSizes.changes`.
RUN_SHAPE = {"mesh": str, "processes": int, "batch_sizes": [(int, int)]}


class DamagedCheckpoint(UsageError):
    """A checkpoint has missing or damaged files or arrays, or arrays with wrong shapes."""

    def __init__(self, reason: str, remedy: str):
        super().__init__(f"{reason}; {remedy}")
        self.reason = reason


def add_checksum(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return `meta` (JSON) with a hash of its content, which `read_meta` verifies."""
    return {**meta, CHECKSUM_KEY: _hash(meta)}


def read_meta(directory: Path, step: int) -> dict[str, Any]:
    """Return the JSON of a checkpoint in a run directory.

    `SHAPE` describes the keys. Unless the checkpoint is marked as `WEIGHTS_ONLY`, `RUN_SHAPE`
    describes additional keys.

    Raises:
        DamagedCheckpoint: if the JSON is missing, invalid or does not match its hash.
        UsageError: if the JSON cannot be read, or belongs to another step.
    """
    checkpoint = directory / "checkpoints" / str(step)
    path = checkpoint / "meta" / "metadata"
    try:
        meta = read_json(path, {CHECKSUM_KEY: str})
        if meta.pop(CHECKSUM_KEY) != _hash(meta):
            raise ValueError(f"its {CHECKSUM_KEY} does not match its content")
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
            f"{checkpoint}: its metadata says that it was saved after step {meta['step']}; rename "
            "it to that step, or remove it"
        )
    return meta


def quarantine(directory: Path, step: int, reason: str) -> dict[str, str]:
    """Rename a damaged checkpoint to STEP.damaged. Return {"path": new path, "reason": reason}.

    If that name is taken, STEP.damaged.2 is used, and so on. Raises `UsageError` if the checkpoint
    cannot be renamed.
    """
    path = directory / "checkpoints" / f"{step}.damaged"
    for number in itertools.count(2):
        if not os.path.exists(path):  # `Path.exists` would raise `PermissionError`
            break
        path = path.with_name(f"{step}.damaged.{number}")
    try:
        path.with_name(str(step)).rename(path)
    except OSError as error:
        raise UsageError(
            f"{reason}; {path.with_name(str(step))} cannot be renamed ({error.strerror or error}); "
            "remove it to continue from the previous checkpoint"
        ) from None
    return {"path": str(path), "reason": reason}


def newest_undamaged(
    directory: Path, on_damage: str, last: int | None = None
) -> tuple[int | None, dict[str, Any], dict[int, DamagedCheckpoint]]:
    """Return the step and JSON of the newest undamaged checkpoint, and the errors of newer ones.

    The errors are keyed by step. Only the JSON of each checkpoint is checked.
    If there is no checkpoint up to step `last`, the step is None, and the JSON is empty.

    Args:
        on_damage: value of checkpoint.on_damage.
        last: ignore checkpoints after this step; None means no limit.

    Raises:
        DamagedCheckpoint: if all checkpoints up to step `last` are damaged, or if the newest of
            them is damaged and `on_damage` is `refuse`.
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


def newest_valid(directory: Path, last: int | None = None) -> tuple[int | None, dict[str, Any]]:
    """Return the step and JSON of the newest checkpoint that has undamaged JSON.

    Checkpoints after step `last` are ignored. If there is no such checkpoint, the step is None, and
    the JSON is empty.
    """
    try:
        return newest_undamaged(directory, "quarantine", last)[:2]
    except DamagedCheckpoint:
        return None, {}


def valid_checkpoints(directory: Path) -> dict[int, dict[str, Any]]:
    """Return the JSON of each checkpoint in a run directory, keyed by step.

    Checkpoints with damaged JSON are left out.
    """
    found = {}
    for step in list_checkpoints(directory):
        with contextlib.suppress(DamagedCheckpoint):  # the next restart quarantines it
            found[step] = read_meta(directory, step)
    return found


def list_checkpoints(directory: Path) -> list[int]:
    """Return the steps of the checkpoints in a run directory, oldest first.

    Every entry of the folder `checkpoints` whose name is a step counts, even if it is damaged.
    Checkpoints that a run is still writing have other names. The list is empty if the folder does
    not exist or is a file. Raises `UsageError` if the folder cannot be read.
    """
    folder = directory / "checkpoints"
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:  # given an empty list, a run would restart at step 1
        raise UsageError(f"{folder}: cannot be read ({error.strerror}); try again") from None
    return sorted(int(name) for name in names if is_step(name))


def choose_checkpoint(run: Path, step: int | None) -> int:
    """Return `step`, or the step of the newest checkpoint if `step` is None.

    Raises `UsageError` if the run directory does not exist or is a file, if it has no checkpoints,
    or if it has no checkpoint at `step`.
    """
    steps = list_checkpoints(run)
    if not run.is_dir():
        raise UsageError(f"{run}: no such folder; give a run directory")
    if not steps:
        remedy = "give a run directory that has one"
        if is_step(run.name) and run.parent.name == "checkpoints":
            remedy = f"give {run.parent.parent}, and {run.name} as the step"
        raise UsageError(f"{run}: has no checkpoints yet; {remedy}")
    if step is None:
        return steps[-1]
    if step not in steps:
        raise UsageError(
            f"step {step}: {run} has no such checkpoint; choose from {', '.join(map(str, steps))}"
        )
    return int(step)  # `step` may be a NumPy integer


def newest_checkpoint(directory: Path, key: str) -> tuple[int, dict[str, Any]]:
    """Return the step and the JSON of the newest checkpoint.

    If there is no checkpoint, raises `UsageError` with a message that starts with `key`.
    """
    steps = list_checkpoints(directory)
    if not steps:
        problem = "has no checkpoint" if directory.is_dir() else "no such folder"
        raise UsageError(
            f"{key}: {problem}; give a run directory, a folder from jaxgpt.convert, or hf:FOLDER "
            "for a Hugging Face model"
        )
    return steps[-1], read_meta(directory, steps[-1])


def remove_temporary(checkpoints: Path) -> None:
    """Clean up a folder after interrupted saves and removals. Errors are ignored."""
    # Leftovers only waste space. Unlike Path.glob, glob.glob ignores errors.
    for scratch in glob.glob(f"{glob.escape(str(checkpoints))}/*{TEMPORARY_SUFFIX}"):
        shutil.rmtree(scratch, ignore_errors=True)


def is_step(name: str) -> bool:
    """Return whether `name` is the name of a checkpoint: a step without leading zeros."""
    return name.isdecimal() and str(int(name)) == name


def _hash(meta: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest()


def describe_error(error: BaseException) -> str:
    """Return a short description of an error.

    An error with an errno is described by the system's message for the errno. Other errors are
    described by their own message (one line, at most 200 characters) or, if they have none, by
    their type.
    """
    if number := os_error(error):
        return os.strerror(number)
    return (" ".join(str(error).split()) or type(error).__name__)[:200]


def os_error(error: BaseException) -> int | None:
    """Return the errno of an error, or None if it has no errno.

    TensorStore raises `ValueError`s that end with `[OS error 5: EIO Input/output error]` or
    `[os_error_code='5']`. `shutil.Error` contains `[Errno 5]` once per file.
    """
    found = re.search(r"\[(?:OS error |os_error_code='|Errno )(\d+)", str(error))
    return int(found[1]) if found else getattr(error, "errno", None)
