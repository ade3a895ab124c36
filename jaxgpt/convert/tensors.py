"""Interface for reading tensors from disk, and atomic output folders."""

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
ROWS = 4096  # number of rows of a matrix to read at a time


class Tensor(Protocol):
    """A tensor in a file written by another program."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return rows [start, stop) as float32. Raise `UsageError` if they cannot be read.

        If `stop` is None, return all rows from `start` on. `stop` must not exceed the number of
        rows. The range must not be empty. Without arguments, return the whole tensor, even if it is
        a scalar.
        """


def check_tied(head: Tensor | None, embedding: Tensor, where: str, remedy: str) -> None:
    """Raise `UsageError` if the output layer of a model with tied embeddings is a different matrix.

    `head` is the file's tensor for the output layer, or None if there is none. `embedding` has the
    shape (V, D). The message begins with `where` and ends with `remedy`. Also raises whatever
    `Tensor.read` raises.
    """
    if head is None:
        return
    n_rows = embedding.shape[0]
    parts = [(first, min(first + ROWS, n_rows)) for first in range(0, n_rows, ROWS)]
    if head.shape != embedding.shape or not all(
        np.array_equal(head.read(*part), embedding.read(*part)) for part in parts
    ):
        raise UsageError(
            f"{where}: lm_head.weight is not the token embedding, but the model ties them; {remedy}"
        )


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `out` when the block ends without an error.

    Missing parent folders of `out` are created. After an error in the block, the temporary folder
    is removed. If the process is killed, `<out>.partial-*` remains. Raises `UsageError` if `out`
    exists and is not a readable, empty folder, if no folder can be created next to it, or if the
    disk is full. Other errors in the block or while renaming are propagated.
    """
    out = out.absolute()
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise UsageError(f"--out {out}: exists and is not an empty folder; {OTHER_FOLDER}")
        out.parent.mkdir(parents=True, exist_ok=True)
        holder = Path(tempfile.mkdtemp(prefix=f"{out.name}.partial-", dir=out.parent))
        partial = holder / out.name  # has default permissions, unlike the folder from mkdtemp
        partial.mkdir()
    except OSError as error:
        raise UsageError(
            f"--out {out}: cannot be written ({error.strerror}); {OTHER_FOLDER}"
        ) from None
    try:
        yield partial
        partial.rename(out)
    except Exception as error:  # the file system and TensorStore raise many types of exceptions
        if _is_disk_full(error):
            raise UsageError(f"--out {out}: the disk is full; free some space") from None
        raise
    finally:
        shutil.rmtree(holder, ignore_errors=True)


def _is_disk_full(error: Exception) -> bool:
    """Return whether an error is caused by a full disk, a quota or a file size limit.

    TensorStore's errors have no errno, so their text is searched.
    """
    words = map(os.strerror, NO_ROOM)
    return getattr(error, "errno", None) in NO_ROOM or any(word in str(error) for word in words)
