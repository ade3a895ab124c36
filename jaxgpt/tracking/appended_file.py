"""Writer for text files that keeps new lines in memory while the disk is full."""

import io
import re
import threading
from collections import deque
from collections.abc import Iterable
from pathlib import Path

from jaxgpt.config import in_words

# Unicode line separators, bidirectional controls, and control characters except tab and newline.
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
LIMIT = 10_000  # maximum number of buffered lines; the oldest lines are dropped


def printable(text: str) -> str:
    """Return `text` with U+FFFD in place of each character in `CONTROLS`.

    A carriage return before a newline is removed.
    """
    return CONTROLS.sub("\ufffd", text.replace("\r\n", "\n"))


class AppendedFile:
    """Appends lines to a text file. Control characters are replaced (see `printable`).

    Lines that cannot be written are kept in memory (at most the last `LIMIT` lines), and each later
    write retries them. Several threads may use the file at the same time.
    """

    def __init__(self, path: Path, keep: bool = True):
        """Set the path. The first write opens the file, and truncates it if `keep` is False."""
        self._path, self._mode = path, "ab" if keep else "wb"
        self._file: io.FileIO | None = None
        self.waiting: deque[str] = deque(maxlen=LIMIT)
        # The thread that handles stop signals may log at the same time as the main thread.
        self._lock = threading.RLock()

    def write(self, *lines: str) -> None:
        """Append at most `LIMIT` lines, each ending with a newline. Raises `OSError` on failure."""
        with self._lock:
            self._write(map(printable, lines))

    def _write(self, lines: Iterable[str]) -> None:
        self.waiting += lines
        try:
            if self._file is None:
                self._file, self._mode = self._path.open(self._mode, buffering=0), "ab"
            while self.waiting:
                self._append(self.waiting[0].encode(errors="replace"))
                self.waiting.popleft()
        except OSError as error:
            self.reopen()  # a restarted file server may reject the old handle
            n = len(self.waiting)
            lines = f"{n} line{'s are' if n != 1 else ' is'}"
            raise OSError(f"{in_words(error)}; {lines} waiting to be written") from None

    def close(self) -> None:
        """Write the buffered lines and close the file. Raises `OSError` if this fails.

        If nothing has been written yet, this creates or truncates the file as the first write does.
        """
        self.write()
        self.reopen()

    def reopen(self) -> None:
        """Close the file. The next write reopens the path, which may be a new file by then.

        Raises `OSError` if closing fails, for example because a disk quota is exceeded on NFS.
        """
        with self._lock:
            file, self._file = self._file, None
            if file is not None:
                file.close()

    def _append(self, line: bytes) -> None:
        """Append the whole line or nothing."""
        end = self._file.seek(0, io.SEEK_END)
        n = 0
        try:
            while n < len(line):  # a disk that is almost full may take only part of a line
                n += self._file.write(line[n:])
        except OSError:
            if n:
                self._file.truncate(end)
            raise
