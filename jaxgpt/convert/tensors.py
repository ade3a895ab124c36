"""Tensors that stay in their files until they are read, and folders that are whole or not there."""

import contextlib
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
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


@dataclass(frozen=True)
class FileTensor:
    """A tensor at an offset of a file, little-endian."""

    path: Path
    name: str  # in errors
    dtype: str  # one of `FLOATS`, or of another program's words, which `read` refuses
    shape: tuple[int, ...]
    offset: int  # bytes
    strides: tuple[int, ...] | None = None  # elements; None is C order

    def read(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return the rows [start, stop) in float32."""
        if self.dtype not in FLOATS:
            raise UsageError(
                f"{self.path}: {self.name} has dtype {self.dtype}; weights are read from "
                f"{', '.join(FLOATS)}"
            )
        dtype = np.dtype(FLOATS[self.dtype])
        if self.strides is not None and self.strides != c_strides(self.shape):
            reach = 1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
            flat = self._bytes(0, (reach if math.prod(self.shape) else 0) * dtype.itemsize)
            in_bytes = [s * dtype.itemsize for s in self.strides]
            view = np.lib.stride_tricks.as_strided(flat.view(dtype), self.shape, in_bytes)
            return np.ascontiguousarray(view[start:stop] if self.shape else view, np.float32)
        if not self.shape:
            return self._bytes(0, dtype.itemsize).view(dtype).reshape(()).astype(np.float32)
        start, stop, _ = slice(start, stop).indices(self.shape[0])
        row = math.prod(self.shape[1:]) * dtype.itemsize
        found = self._bytes(start * row, (stop - start) * row).view(dtype)
        return found.reshape(stop - start, *self.shape[1:]).astype(np.float32, copy=False)

    def _bytes(self, start: int, count: int) -> np.ndarray:
        try:
            found = np.fromfile(self.path, np.uint8, count, offset=self.offset + start)
        except OSError as error:
            raise UsageError(f"{self.path}: cannot be read ({error.strerror})") from None
        if found.size != count:
            raise UsageError(f"{self.path}: ends inside {self.name}; copy the file again")
        return found


def c_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a C-ordered array, in elements."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


@contextlib.contextmanager
def new_folder(out: Path, n_bytes: int) -> Iterator[Path]:
    """Yield a folder to write to, which is renamed to `out` once everything is in it.

    An error leaves nothing; a kill leaves a folder `<out>.partial-*`. Raises `UsageError` if `out`
    holds something, cannot be written, or has no room for `n_bytes`.
    """
    remedy, out = OTHER_FOLDER, out.absolute()
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise UsageError(f"--out {out}: is there, and not an empty folder; {remedy}")
        out.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(out.parent).free
        if n_bytes > free:
            raise UsageError(
                f"--out {out}: {n_bytes / 1e6:,.1f} MB are to be written and {free / 1e6:,.1f} MB "
                f"are free there; make room, or {remedy}"
            )
        holder = Path(tempfile.mkdtemp(prefix=f"{out.name}.partial-", dir=out.parent))
        partial = holder / out.name  # which others may read, unlike its holder
        partial.mkdir()
    except OSError as error:
        raise UsageError(f"--out {out}: cannot be written ({error.strerror}); {remedy}") from None
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
