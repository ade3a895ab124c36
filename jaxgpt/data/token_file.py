"""Token ids on disk, of which only the requested ones are read.

They are read with `pread`, not through a memory map: a process does not grow with what it reads,
and a file that becomes shorter is an error with its name, where a map would end it with SIGBUS.
"""

import functools
import hashlib
import os
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from jaxgpt.cluster.hardware import raise_open_file_limit
from jaxgpt.config import UsageError

PAGE = 16384  # bytes
SAMPLED_PAGES = 4096  # at most this many of all files are hashed and scanned: all of 64 MiB
OTHER_FILES = 512  # that a process may have open beside its data


def allow_open_files(count: int) -> None:
    """Allow `count` open token files, of which shells mostly allow 1024; else `UsageError`."""
    wanted = count + OTHER_FILES
    limit = raise_open_file_limit(wanted)
    if limit < wanted:
        raise UsageError(
            f"data: has {count} files, but a process may have no more than {limit} open at once; "
            f"raise the limit, `ulimit -Hn`, to {wanted}, or join small files"
        )


class TokenFile:
    """A file with an array of token ids; it is opened when it is first read, and stays open."""

    def __init__(self, path: Path, dtype: np.dtype, size: int, header: int = 0):
        """Take a file of `size` tokens after `header` bytes."""
        self.path = path
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.size = size
        self._header = header

    @functools.cached_property
    def _descriptor(self) -> int:
        try:
            descriptor = os.open(self.path, os.O_RDONLY)
        except OSError as error:
            raise UsageError(f"{self.path}: cannot be opened ({error.strerror})") from None
        weakref.finalize(self, os.close, descriptor)
        return descriptor

    def read(self, start: int, count: int) -> np.ndarray:
        """Return `count` token ids from number `start` on: the file's dtype, shape (count,).

        Raises:
            UsageError: if the file cannot be read or ends before them.
        """
        tokens, file = np.empty(count, self.dtype), self._descriptor
        offset = self._header + start * self.dtype.itemsize
        try:
            found = os.preadv(file, [tokens], offset)
        except OSError as error:
            raise UsageError(
                f"{self.path}: cannot be read at byte {offset} ({error.strerror})"
            ) from None
        if found < tokens.nbytes:
            raise UsageError(
                f"{self.path}: ends at byte {os.fstat(file).st_size}, before token "
                f"{start + count - 1}; it has become shorter since it was opened; "
                "bring it back, and start again with the same --out"
            )
        return tokens


class Tokens:
    """The token ids of a file, or a range of them, and their weights in the loss."""

    def __init__(
        self,
        file: TokenFile,
        first: int = 0,
        size: int | None = None,
        mask: TokenFile | None = None,
    ):
        """Take `size` tokens (by default all) from number `first` on.

        The mask has a byte for each token of the file: 1 if it counts in the loss as a target, or
        0. Without a mask all tokens count.
        """
        self.file = file
        self.mask = mask
        self.dtype = file.dtype
        self.first = first
        self.size = file.size - first if size is None else size

    def part(self, first: int, end: int) -> "Tokens":
        """Return the tokens from `first` up to `end`, not included, from the same open file."""
        return Tokens(self.file, self.first + first, end - first, self.mask)

    def read(self, start: int, count: int) -> np.ndarray:
        """Return `count` token ids from number `start` on: `dtype`, shape (count,)."""
        assert 0 <= start and start + count <= self.size, (start, count, self.size)
        return self.file.read(self.first + start, count)

    def read_weights(self, start: int, count: int) -> np.ndarray:
        """Return the weights of `count` tokens as targets, 0 or 1: uint8, shape (count,).

        Raises:
            UsageError: if the mask cannot be read or holds another number.
        """
        if self.mask is None:
            return np.ones(count, np.uint8)
        assert 0 <= start and start + count <= self.size, (start, count, self.size)
        weights = self.mask.read(self.first + start, count)
        if weights.max(initial=0) > 1:
            at = int(np.argmax(weights > 1))
            raise UsageError(
                f"{self.mask.path}: byte {self.first + start + at} is {weights[at]}, but must be 1 "
                "for a token that counts in the loss, or 0; prepare the data again"
            )
        return weights

    def check_vocab_range(self, tokens: np.ndarray, start: int, vocab_size: int) -> None:
        """Raise `UsageError` unless `tokens`, read from `start` on, are ids below `vocab_size`."""
        if 0 <= tokens.min() and tokens.max() < vocab_size:
            return
        at = int(np.argmax((tokens >= vocab_size) | (tokens < 0)))
        raise UsageError(
            f"model.vocab_size={vocab_size}: {self.file.path} holds token {tokens[at]} at offset "
            f"{self.first + start + at}; prepare the data again, or give its own vocabulary: more "
            f"than {tokens[at]}"
        )

    def sampled_pages(self, most: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (number of the first token, ids) of evenly spaced pages, first and last too."""
        per_page = PAGE // self.dtype.itemsize
        pages = -(-self.size // per_page)
        for page in np.unique(np.linspace(0, pages - 1, min(pages, most)).astype(np.int64)):
            start = int(page) * per_page
            yield start, self.read(start, min(per_page, self.size - start))


def fingerprint(splits: Mapping[str, Tokens], vocab_size: int, most: int = SAMPLED_PAGES) -> str:
    """Return a hash of sizes, dtype, vocabulary and at most `most` sampled pages of each split.

    A page is hashed with its part of the mask, if there is one.
    """
    digest = hashlib.sha256(f"{vocab_size}".encode())
    for split, tokens in splits.items():
        digest.update(f"{split} {tokens.size} {tokens.dtype.name}".encode())
        if tokens.mask is not None:
            digest.update(b" mask")
        for start, page in tokens.sampled_pages(most):
            digest.update(page.tobytes())
            if tokens.mask is not None:
                digest.update(tokens.read_weights(start, page.size).tobytes())
    return "sha256:" + digest.hexdigest()
