"""Files that a run appends lines to, also after the disk was full for a while."""

import io
from collections import deque
from pathlib import Path

from jaxgpt.config import in_words

LIMIT = 10_000  # lines that wait to be written; the oldest are dropped


class AppendedFile:
    """A text file. Lines that cannot be written wait, and the next call writes them in order."""

    def __init__(self, path: Path, keep: bool = True):
        """Open the file with the first line; `keep` appends to an existing file."""
        self._path, self._mode = path, "ab" if keep else "wb"
        self._file: io.FileIO | None = None
        self.waiting: deque[str] = deque(maxlen=LIMIT)

    def write(self, *lines: str) -> None:
        """Append lines, which end with a newline each; `OSError` if they have to wait."""
        self.waiting += lines
        try:
            if self._file is None:
                self._file, self._mode = self._path.open(self._mode, buffering=0), "ab"
            while self.waiting:
                self._append(self.waiting[0].encode(errors="replace"))
                self.waiting.popleft()
        except OSError as error:
            self.reopen()  # a file server that was restarted may not know the open file
            n = len(self.waiting)
            lines = f"{n} line{'s wait' if n > 1 else ' waits'}"
            raise OSError(f"{in_words(error)}; {lines} to be written") from None

    def close(self) -> None:
        """Write what waits, and close the file; the next line would open it again."""
        self.write()
        self.reopen()

    def reopen(self) -> None:
        """Open the file again with the next line, because another one may have its name then."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _append(self, line: bytes) -> None:
        """Append a whole line or nothing."""
        end = self._file.seek(0, io.SEEK_END)
        n = 0
        try:
            while n < len(line):  # what a full disk takes of a line is shorter than the line
                n += self._file.write(line[n:])
        except OSError:
            if n:
                self._file.truncate(end)
            raise
