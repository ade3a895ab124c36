"""Reader for Megatron-LM's indexed datasets (PREFIX.bin and PREFIX.idx). It does not need torch.

PREFIX.bin holds all tokens, one sequence after another. PREFIX.idx is little-endian and contains

    9 bytes "MMIDIDX\\0\\0", uint64 version 1, uint8 dtype code of the tokens,
    uint64 number of sequences S, uint64 number of documents + 1,
    int32[S] number of tokens in each sequence, int64[S] byte offset of each sequence,
    int64[documents + 1] first sequence of each document, followed by S,
    int8[S] mode of each sequence, only in multimodal data (0: text)

The format is defined in Megatron-LM's megatron/core/datasets/indexed_dataset.py and in
Megatron-DeepSpeed's megatron/data/indexed_dataset.py ("mmap"). The arrays are not aligned in the
file. NumPy operations would copy an unaligned array in full, so elements are read one at a time.
"""

import bisect
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxgpt.config import UsageError
from jaxgpt.data.source import Document, OpenSource
from jaxgpt.data.token_file import TokenFile, Tokens

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
CODES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_SAMPLES = 64  # maximum number of sequences and of documents to check


@dataclass(frozen=True)
class Index:
    """Contents of a .idx file, which describes a .bin file. The arrays are memory-mapped."""

    bin_path: Path
    dtype: np.dtype  # dtype of the tokens, little-endian
    lengths: np.ndarray  # number of tokens in each sequence: int32, shape (sequences,)
    pointers: np.ndarray  # byte offset of each sequence: int64, shape (sequences,)
    documents: np.ndarray  # first sequence of each document, then S: int64, (documents + 1,)

    @property
    def total_tokens(self) -> int:
        """Number of tokens in the .bin file."""
        return int(self.pointers[-1]) // self.dtype.itemsize + int(self.lengths[-1])

    def document_start(self, document: int) -> int:
        """Return the token offset of a document's start, in O(1).

        If `document` equals the number of documents, return `total_tokens`.
        """
        sequence = int(self.documents[document])
        if sequence == len(self.pointers):
            return self.total_tokens
        return int(self.pointers[sequence]) // self.dtype.itemsize

    def find(self, token: int) -> Document:
        """Return the document that contains the token at offset `token`, by binary search.

        `token` must be at least 0 and less than `total_tokens`.
        """
        assert 0 <= token < self.total_tokens, token
        # An empty sequence has the same start as the next sequence, so use the last match.
        sequence = bisect.bisect_right(self.pointers, token * self.dtype.itemsize) - 1
        number = bisect.bisect_right(self.documents, sequence) - 1
        return Document(number, self.document_start(number))


def is_pair(path: Path) -> bool:
    """Return whether `path` names a pair whose PREFIX.idx exists.

    `path` may be PREFIX, PREFIX.bin or PREFIX.idx. PREFIX is also accepted if only PREFIX.bin
    exists, so that an error can name the missing .idx. Folders are not accepted. May raise
    `OSError` if a path cannot be accessed.
    """
    prefix = prefix_of(path)
    lacks_idx = path == prefix and Path(f"{prefix}.bin").is_file()
    return not path.is_dir() and (Path(f"{prefix}.idx").is_file() or lacks_idx)


def open_pair(path: Path) -> OpenSource:
    """Open a file pair as the "train" split.

    `is_pair` must accept `path`.
    """
    index = read_index(path)
    file = TokenFile(index.bin_path, index.dtype, index.total_tokens)
    return OpenSource({"train": Tokens(file)}, index.find)


def prefix_of(path: Path | str) -> Path:
    """Return the prefix of a path of the form PREFIX, PREFIX.bin or PREFIX.idx."""
    path = Path(path)
    return path.with_suffix("") if path.suffix in (".bin", ".idx") else path


def read_index(prefix: Path | str) -> Index:
    """Open PREFIX.idx, and check a sample of its entries and the size of PREFIX.bin.

    `prefix` has one of the forms that `prefix_of` accepts.

    Raises:
        UsageError: if a file is missing, damaged or empty, if PREFIX.idx is unreadable, or if the
            data is not text.
    """
    prefix = prefix_of(prefix)
    bin_path, idx_path = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
    try:
        bin_bytes, idx_bytes = bin_path.stat().st_size, idx_path.stat().st_size
        with open(idx_path, "rb") as file:
            header = file.read(HEADER.size)
    except OSError as error:
        raise UsageError(
            f"{error.filename}: cannot be read ({error.strerror}); Megatron data consists of "
            "PREFIX.bin and PREFIX.idx (for a nanoGPT file, include the suffix .bin in the path)"
        ) from None
    mark, version, code, sequences, bounds = HEADER.unpack(header.ljust(HEADER.size, b"\0"))
    _check(mark == MAGIC, idx_path, 0, mark, MAGIC)
    is_whole = len(header) == HEADER.size
    _check(is_whole, idx_path, len(header), "end of file", f"a header of {HEADER.size} bytes")
    _check(version == 1, idx_path, 9, f"version {version}", "version 1")
    _check(code in CODES, idx_path, 17, f"dtype code {code}", f"one of {list(CODES)} (integers)")
    pointers_at = HEADER.size + 4 * sequences
    documents_at = pointers_at + 8 * sequences
    end = documents_at + 8 * bounds
    is_whole = idx_bytes in (end, end + sequences)
    _check(is_whole, idx_path, idx_bytes, "end of file", f"it at byte {end}, as in the header")
    _check(
        sequences and bounds and bin_bytes, bin_path, bin_bytes, "end of file", "one or more tokens"
    )

    def array(dtype: str, at: int, size: int) -> np.ndarray:
        return np.asarray(np.memmap(idx_path, dtype, "r", at, (size,)))

    index = Index(
        bin_path,
        np.dtype(CODES[code]),
        array("<i4", HEADER.size, sequences),
        array("<i8", pointers_at, sequences),
        array("<i8", documents_at, bounds),
    )
    if idx_bytes > end:
        modes = array("i1", end, sequences)
        i = int((modes != 0).argmax())
        _check(modes[i] == 0, idx_path, end + i, f"mode {modes[i]} of sequence {i}", "0 (text)")
    # The first sequence starts at byte 0. Every later sequence starts where the previous one ends.
    starts = {0: 0} | {i + 1: _end_of(index, i) for i in _sample(sequences - 1)}
    for i, start in starts.items():
        found, expected = f"start {index.pointers[i]} of sequence {i}", f"{start} (no gap)"
        _check(index.pointers[i] == start, idx_path, pointers_at + 8 * i, found, expected)
    end = _end_of(index, sequences - 1)
    _check(
        bin_bytes == end, bin_path, bin_bytes, "end of file", f"it at byte {end}, as in the .idx"
    )
    starts = index.documents
    is_sorted = all(starts[i] <= starts[i + 1] for i in _sample(bounds - 1))
    is_partition = is_sorted and starts[0] == 0 and starts[-1] == sequences
    found, expected = "invalid documents", f"a partition of the {sequences} sequences"
    _check(is_partition, idx_path, documents_at, found, expected)
    return index


def _check(ok: object, path: Path, byte: int, found: object, expected: object) -> None:
    if not ok:
        raise UsageError(
            f"{path}: found {found} at byte {byte}, expected {expected}; copy both files again, or "
            "rebuild them from text with --dataset-impl mmap"
        )


def _end_of(index: Index, sequence: int) -> int:
    """Return the byte offset of a sequence's end in the .bin file."""
    return int(index.pointers[sequence]) + int(index.lengths[sequence]) * index.dtype.itemsize


def _sample(n: int) -> list[int]:
    """Return at most _SAMPLES evenly spaced numbers from 0..n-1, including the first and last."""
    return sorted({i * (n - 1) // (_SAMPLES - 1) for i in range(_SAMPLES)}) if n else []
