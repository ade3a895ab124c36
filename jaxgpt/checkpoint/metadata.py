"""The JSON beside the state of a checkpoint: what a run needs to go on from it."""

import contextlib
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxgpt.config import UsageError

SEAL = "sha256"  # the key of the hash of everything else


def add_checksum(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return `meta` with a hash of itself, by which `load_metadata` sees a change."""
    return {**meta, SEAL: _hash(meta)}


def load_metadata(checkpoint: Path) -> dict[str, Any]:
    """Return the metadata of `checkpoint`, the folder of a step.

    Raises:
        UsageError: if it cannot be read, or has changed.
    """
    path = checkpoint / "meta" / "metadata"
    try:
        meta = json.loads(path.read_text())
        found = meta.pop(SEAL, None)
        if found != _hash(meta):
            raise ValueError(f"its {SEAL} is not that of its content")
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise _damaged(path, error) from None
    return meta


def read_meta(directory: Path, step: int) -> dict[str, Any]:
    """Return the JSON that was saved beside the state of `step` in a run directory.

    Raises:
        UsageError: if it cannot be read, has changed, or is that of another step.
    """
    checkpoint = directory / "checkpoints" / str(step)
    meta = load_metadata(checkpoint)
    missing = {"step", "config", "mesh", "processes", "data_fingerprint", "tokenizer"} - set(meta)
    if missing:
        raise _damaged(checkpoint / "meta" / "metadata", "keys are missing")
    if meta["step"] != step:
        raise UsageError(
            f"{checkpoint}: was saved after step {meta['step']}, says its metadata; give it that "
            "name, or remove it"
        )
    return meta


def valid_checkpoints(directory: Path, steps: Iterable[int]) -> dict[int, dict[str, Any]]:
    """Return what `read_meta` gives, by step, without the steps of which it gives nothing."""
    found = {}
    for step in steps:
        with contextlib.suppress(UsageError):
            found[step] = read_meta(directory, step)
    return found


def list_checkpoints(directory: Path) -> list[int]:
    """Return the steps of the checkpoints in a run directory, oldest first.

    Also of one that has been damaged since: whoever takes it has to hear of it. Not of those being
    written.
    """
    names = (path.name for path in (directory / "checkpoints").glob("*"))
    return sorted(int(name) for name in names if is_step(name))


def is_step(name: str) -> bool:
    """Return whether a checkpoint may have this name."""
    return name.isdecimal() and str(int(name)) == name


def _damaged(path: Path, reason: object) -> UsageError:
    return UsageError(
        f"{path}: is damaged ({reason}); remove {path.parent.parent} to go on from an older "
        "checkpoint, if there is one"
    )


def _hash(meta: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest()
