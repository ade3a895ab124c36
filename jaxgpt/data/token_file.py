"""Flat arrays of token ids on disk, of which only what is asked for is read.

They are read with `pread`, not through a memory map: the rows of a file of any size pass through
one buffer, so that a process does not grow; and a file that becomes shorter while a run reads it
is an error with a name and an offset, where a memory map would end the process with SIGBUS.
"""

import copy
import functools
import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from jaxgpt.cluster.hardware import raise_open_file_limit
from jaxgpt.config import UsageError

PAGE = 16384  # bytes
SAMPLED_PAGES = 4096  # at most this many of all files are hashed and scanned: all of 64 MiB
OTHER_FILES = 512  # that a process may have open beside its data


def allow_open_files(count: int) -> None:
    """Lets this process have `count` token files open; a shell mostly allows 1024 files.

    Raises:
        UsageError: if this host allows fewer.
    """
    wanted = count + OTHER_FILES
    if (limit := raise_open_file_limit(wanted)) < wanted:
        raise UsageError(
            f"data: has {count} files, but a process may have no more than {limit} open at once; "
            f"raise the limit, `ulimit -Hn`, to {wanted}, or join small files"
        )


class OpenFile:
    """A file that is opened when it is first read, and stays open."""

    def __init__(self, path: Path):
        self._path = path

    @functools.cached_property
    def descriptor(self) -> int:
        try:
            return os.open(self._path, os.O_RDONLY)
        except OSError as error:
            raise UsageError(f"{self._path}: cannot be opened ({error.strerror})") from None


class TokenFile:
    """Some tokens of a file: all of it, or the part from `first` on."""

    def __init__(self, path: Path, dtype: np.dtype, size: int):
        """All of a file.

        Args:
            dtype: of the ids, an integer type.
            size: tokens.
        """
        self.path = path
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.size = size
        self.first = 0
        self._file = OpenFile(path)

    def part(self, first: int, end: int) -> "TokenFile":
        """The tokens from `first` up to `end`, not included; all parts share one open file."""
        part = copy.copy(self)
        part.size, part.first = end - first, self.first + first
        return part

    def read(self, start: int, count: int) -> np.ndarray:
        """`count` token ids from number `start` on, as they are in the file.

        Raises:
            UsageError: if the file cannot be read or ends before them.
        """
        assert 0 <= start and start + count <= self.size, (start, count, self.size)
        tokens, file = np.empty(count, self.dtype), self._file.descriptor
        offset = (self.first + start) * self.dtype.itemsize
        try:
            found = os.preadv(file, [tokens], offset)
        except OSError as error:
            raise UsageError(
                f"{self.path}: cannot be read at byte {offset} ({error.strerror})"
            ) from None
        if found < tokens.nbytes:
            raise UsageError(
                f"{self.path}: ends at byte {os.fstat(file).st_size}, before token "
                f"{self.first + start + count - 1}; it has become shorter since it was opened; "
                "bring it back, and start again with the same --out"
            )
        return tokens

    def check(self, tokens: np.ndarray, start: int, vocab_size: int) -> None:
        """Refuses ids outside the vocabulary among those that were read from `start` on.

        Raises:
            UsageError: naming the file, the offset and the token.
        """
        is_signed = self.dtype.kind == "i"
        if tokens.max() < vocab_size and not (is_signed and tokens.min() < 0):
            return
        at = int(np.argmax((tokens >= vocab_size) | (tokens < 0)))
        token = int(tokens[at])
        remedy = "prepare the data again"
        if token >= 0:
            remedy += f", or set model.vocab_size to at least {token + 1}"
        raise UsageError(
            f"model.vocab_size={vocab_size}: {self.path} holds token {token} at offset "
            f"{self.first + start + at}; {remedy}"
        )

    def sampled_pages(self, most: int = SAMPLED_PAGES) -> Iterator[tuple[int, np.ndarray]]:
        """(number of the first token, ids) of evenly spaced pages, the first and last included."""
        per_page = PAGE // self.dtype.itemsize
        pages = -(-self.size // per_page)
        for page in np.unique(np.linspace(0, pages - 1, min(pages, most)).astype(np.int64)):
            start = int(page) * per_page
            yield start, self.read(start, min(per_page, self.size - start))


def fingerprint_of(
    splits: Mapping[str, TokenFile], vocab_size: int, most_pages: int = SAMPLED_PAGES
) -> str:
    """A hash that changes when the data does: sizes, dtype, vocabulary, sampled pages.

    Args:
        splits: the files of "train" and "val", of which at most `most_pages` each are read.
    """
    digest = hashlib.sha256(f"{vocab_size}".encode())
    for split, tokens in splits.items():
        digest.update(f"{split} {tokens.size} {tokens.dtype.name}".encode())
        for _, page in tokens.sampled_pages(most_pages):
            digest.update(page.tobytes())
    return "sha256:" + digest.hexdigest()
