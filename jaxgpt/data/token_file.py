"""Token IDs on disk, read on demand.

Files are read with `pread` instead of a memory map, so that memory use does not grow while reading.
If a file is truncated, the error message names the file, whereas a memory map would kill the
process with SIGBUS.
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
# Number of pages to hash and check per split (64 MiB in total), divided among the sources.
SAMPLED_PAGES = 4096
OTHER_FILES = 512  # allowance for other open files


def allow_open_files(count: int) -> None:
    """Raise the process's limit on open files (often 1024) to at least `count` + `OTHER_FILES`.

    Raises `UsageError` if the hard limit is too low.
    """
    wanted = count + OTHER_FILES
    limit = raise_open_file_limit(wanted)
    if limit < wanted:
        raise UsageError(
            f"data: there are {count} token files, but a process may open only {limit} files; "
            f"raise the hard limit (`ulimit -Hn`) to {wanted}, or merge small files"
        )


class TokenFile:
    """A file with an array of token IDs or loss weights.

    The file is opened on the first read, and closed when this object is garbage-collected.
    """

    def __init__(self, path: Path, dtype: np.dtype, size: int, header: int = 0):
        """Describe a file with a header of `header` bytes and `size` little-endian tokens."""
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
        """Return `count` token IDs starting at token `start`: the file's dtype, shape (count,).

        Raises `UsageError` if the file cannot be read or is too short.
        """
        tokens, file = np.empty(count, self.dtype), self._descriptor
        offset = self._header + start * self.dtype.itemsize
        try:
            view, found = memoryview(tokens).cast("B"), 0
            while found < len(view) and (n := os.preadv(file, [view[found:]], offset + found)):
                found += n  # one call reads at most 2 GiB
        except OSError as error:
            raise UsageError(
                f"{self.path}: cannot be read at byte {offset} ({error.strerror})"
            ) from None
        if found < tokens.nbytes:
            raise UsageError(
                f"{self.path}: ends at byte {os.fstat(file).st_size}, before token "
                f"{start + count - 1}; the file has been truncated since it was opened; "
                "restore it and start again with the same run directory"
            )
        return tokens


class Tokens:
    """The token IDs in a file or a part of it, with their loss weights."""

    def __init__(
        self,
        file: TokenFile,
        first: int = 0,
        size: int | None = None,
        mask: TokenFile | None = None,
    ):
        """Select `size` tokens starting at token `first`.

        By default, all tokens from `first` to the end of the file are selected. `mask` has one byte
        for each token of the file: 1 if the token counts toward the loss, 0 if not. Without a mask,
        all tokens count.
        """
        self.file = file
        self.mask = mask
        self.dtype = file.dtype
        self.first = first
        self.size = file.size - first if size is None else size

    def part(self, first: int, end: int) -> "Tokens":
        """Return tokens `first` to `end` - 1 of this part as a view that shares the open file."""
        return Tokens(self.file, self.first + first, end - first, self.mask)

    def read(self, start: int, count: int) -> np.ndarray:
        """Return `count` token IDs starting at token `start`: `dtype`, shape (count,).

        `start` counts from the start of this part. All of the tokens must be in this part.
        """
        assert 0 <= start and start + count <= self.size, (start, count, self.size)
        return self.file.read(self.first + start, count)

    def read_weights(self, start: int, count: int) -> np.ndarray:
        """Return the loss weights (0 or 1) of `count` tokens, starting at `start` in this part.

        Each weight multiplies the loss of predicting its token. The result is uint8, shape
        (count,). Raises `UsageError` if the mask holds a byte other than 0 or 1.
        """
        if self.mask is None:
            return np.ones(count, np.uint8)
        assert 0 <= start and start + count <= self.size, (start, count, self.size)
        weights = self.mask.read(self.first + start, count)
        if weights.max(initial=0) > 1:
            at = int(np.argmax(weights > 1))
            raise UsageError(
                f"{self.mask.path}: byte {self.first + start + at} is {weights[at]}, but must be 1 "
                "for a token that counts toward the loss and 0 otherwise; prepare the data again"
            )
        return weights

    def check_vocab_range(self, tokens: np.ndarray, start: int, vocab_size: int) -> None:
        """Raise `UsageError` if any of the token IDs is outside the vocabulary.

        `tokens` is a nonempty array of shape (n,). `start` is the offset of `tokens[0]` in
        this part of the file.
        """
        if 0 <= tokens.min() and tokens.max() < vocab_size:
            return
        at = int(np.argmax((tokens >= vocab_size) | (tokens < 0)))
        raise UsageError(
            f"model.vocab_size={vocab_size}: {self.file.path} holds token {tokens[at]} at offset "
            f"{self.first + start + at}; prepare the data again, or set model.vocab_size to the "
            f"vocabulary size of the data, which is more than {tokens[at]}"
        )

    def sampled_pages(self, most: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (offset of the first token, token IDs) for up to `most` evenly spaced pages.

        A page has `PAGE` bytes, but the last page may be shorter. Offsets count tokens from the
        start of this part of the file. Each array of IDs has shape (n,) and the file's dtype. The
        pages include the first page if `most` > 0, and the last page if `most` > 1. An empty part
        has no pages.
        """
        per_page = PAGE // self.dtype.itemsize
        pages = -(-self.size // per_page)
        for page in np.unique(np.linspace(0, pages - 1, min(pages, most)).astype(np.int64)):
            start = int(page) * per_page
            yield start, self.read(start, min(per_page, self.size - start))


def fingerprint(splits: Mapping[str, Tokens], vocab_size: int, most: int = SAMPLED_PAGES) -> str:
    """Return a hash of the vocabulary size and of the name, size, dtype and pages of each split.

    The hash has the form "sha256:DIGEST". It depends on the order of `splits`. At most `most` pages
    of each split are hashed, with their loss masks.
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
