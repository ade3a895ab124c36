"""Writing and reading files as `dd` does, as what a checkpoint is compared with."""

import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

BLOCK = 2**23  # bytes that are written or read at a time

_block = memoryview(np.random.default_rng(0).bytes(BLOCK))  # no file system can compress it


def write(folder: Path, sizes: Sequence[tuple[str, int]]) -> None:
    """Writes files of so many bytes from memory, each of them to the disk (fsync)."""
    for name, size in sizes:
        with (folder / name).open("wb", buffering=0) as file:
            left = size
            while left:
                left -= file.write(_block[:left])
            os.fsync(file.fileno())


def read(folder: Path, sizes: Sequence[tuple[str, int]]) -> None:
    """Reads files into one buffer, over and over."""
    buffer = bytearray(BLOCK)
    for name, _ in sizes:
        with (folder / name).open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def read_and_keep(folder: Path, sizes: Sequence[tuple[str, int]]) -> list[mmap.mmap]:
    """Reads files into memory of their own, which the system has to provide page by page."""
    kept = []
    for name, size in sizes:
        memory = mmap.mmap(-1, max(size, 1))
        view, done = memoryview(memory), 0
        with (folder / name).open("rb", buffering=0) as file:
            while done < size:
                done += file.readinto(view[done : min(size, done + BLOCK)])
        kept.append(memory)
    return kept


def forget(folder: Path) -> bool:
    """Has the system's page cache drop all files of a folder, so that reading asks the disk.

    Returns whether the system can do that.
    """
    if not hasattr(os, "posix_fadvise"):  # macOS
        return False
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return True
