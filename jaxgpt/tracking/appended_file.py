"""Files that a run appends lines to, even if the disk is full for a while."""

import io
from collections import deque
from pathlib import Path

from jaxgpt.config import in_words

LIMIT = 10_000  # maximum number of waiting lines; beyond it, the oldest are dropped


class AppendedFile:
    """A text file. Lines that cannot be written wait, and the next call writes them in order."""

    def __init__(self, path: Path, keep: bool = True):
        """Set the path; the first line opens the file. `keep` appends to an existing file."""
        self._path, self._mode = path, "ab" if keep else "wb"
        self._file: io.FileIO | None = None
        self.waiting: deque[str] = deque(maxlen=LIMIT)

    def write(self, *lines: str) -> None:
        """Append lines, each ending with a newline; raise `OSError` if they have to wait."""
        self.waiting += lines
        try:
            if self._file is None:
                self._file, self._mode = self._path.open(self._mode, buffering=0), "ab"
            while self.waiting:
                self._append(self.waiting[0].encode(errors="replace"))
                self.waiting.popleft()
        except OSError as error:
            self.reopen()  # after a restart, a file server may not recognize the open file
            n = len(self.waiting)
            lines = f"{n} line{'s are' if n > 1 else ' is'}"
            raise OSError(f"{in_words(error)}; {lines} waiting to be written") from None

    def close(self) -> None:
        """Write the waiting lines and close the file; another line would open it again."""
        self.write()
        self.reopen()

    def reopen(self) -> None:
        """Close the file; the next line opens the path again, which may then be another file."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _append(self, line: bytes) -> None:
        """Append a whole line or nothing."""
        end = self._file.seek(0, io.SEEK_END)
        n = 0
        try:
            while n < len(line):  # a disk that is almost full may take only part of a line
                n += self._file.write(line[n:])
        except OSError:
            if n:
                self._file.truncate(end)
            raise
