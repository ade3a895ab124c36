"""The interface of tensors that stay in their files, and output folders that are made whole."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import ml_dtypes
import numpy as np

from jaxgpt.config import UsageError
from jaxgpt.convert import OTHER_FOLDER
from jaxgpt.tracking.jsonl import NO_ROOM

FLOATS = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


class Tensor(Protocol):
    """A tensor of another program."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return the rows [start, stop) in float32; `UsageError` if they cannot be read."""


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a folder to write to, which is renamed to `out` once everything is in it.

    An error leaves nothing; a kill leaves a folder `<out>.partial-*`. Raises `UsageError` if `out`
    holds something, cannot be written, or has no room.
    """
    out = out.absolute()
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise UsageError(f"--out {out}: is there, and not an empty folder; {OTHER_FOLDER}")
        out.parent.mkdir(parents=True, exist_ok=True)
        holder = Path(tempfile.mkdtemp(prefix=f"{out.name}.partial-", dir=out.parent))
        partial = holder / out.name  # which others may read, unlike its holder
        partial.mkdir()
    except OSError as error:
        raise UsageError(
            f"--out {out}: cannot be written ({error.strerror}); {OTHER_FOLDER}"
        ) from None
    try:
        yield partial
        partial.rename(out)
    except Exception as error:  # of the file system or of TensorStore, which has many
        if is_no_room(error):
            raise UsageError(f"--out {out}: no room is left on its disk; make room") from None
        raise
    finally:
        shutil.rmtree(holder, ignore_errors=True)


def is_no_room(error: Exception) -> bool:
    """Return whether a disk or a quota is full; TensorStore's errors say so in words only."""
    words = map(os.strerror, NO_ROOM)
    return getattr(error, "errno", None) in NO_ROOM or any(word in str(error) for word in words)
