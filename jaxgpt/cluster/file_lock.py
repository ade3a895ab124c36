"""Advisory POSIX locks on files."""

import errno
import fcntl
import os
import struct
import sys
from pathlib import Path
from typing import Literal, TextIO


def lock_file(file: TextIO) -> Literal["locked", "taken", "unsupported"]:
    """Try to lock an open, writable file, without waiting.

    Returns "locked" on success, "taken" if another process holds the lock, and "unsupported" if
    locking fails for another reason. The lock is released when this process closes any descriptor
    for the file.
    """
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return "taken" if error.errno in (errno.EACCES, errno.EAGAIN) else "unsupported"
    return "locked"


def is_locked(path: Path) -> bool:
    """Return whether another process has locked a file with `lock_file`.

    This does not take the lock, so it cannot disturb a run that is starting. However, it opens and
    closes the file, so any lock held by this process is released. Returns False if the file cannot
    be opened, if its file system does not support locks, or if the operating system is not Linux.
    """
    if sys.platform != "linux":
        return False
    query = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        with path.open("rb") as file:
            answer = fcntl.fcntl(file, fcntl.F_GETLK, query)
    except OSError:  # absent, or on a file system without locks
        return False
    return struct.unpack("hhqqi4x", answer)[0] != fcntl.F_UNLCK
