"""Megatron-LM's indexed data sets: PREFIX.bin and PREFIX.idx, read without torch.

PREFIX.bin is all tokens, one sequence after the other. PREFIX.idx, little-endian, is

    9 bytes "MMIDIDX\\0\\0", uint64 version 1, uint8 code of the tokens' dtype,
    uint64 number of sequences S, uint64 number of documents + 1,
    int32[S] tokens in each sequence, int64[S] byte at which each sequence starts,
    int64[documents + 1] sequence with which each document starts, and S at the end,
    int8[S] modes, only in multimodal data: 0 where a sequence is text

as in Megatron-LM's megatron/core/datasets/indexed_dataset.py and in Megatron-DeepSpeed's
megatron/data/indexed_dataset.py ("mmap"). The arrays start at odd places of the file, where NumPy
copies whole arrays, so they are read element by element.
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
_SAMPLES = 64  # sequences and documents that `read_index` looks at


@dataclass(frozen=True)
class Index:
    """What a .idx file says about the tokens in its .bin file; its arrays are memory maps."""

    bin_path: Path
    dtype: np.dtype  # of the tokens, little-endian
    lengths: np.ndarray  # tokens in each sequence: int32, shape (sequences,)
    pointers: np.ndarray  # byte at which each sequence starts: int64, shape (sequences,)
    documents: np.ndarray  # each one's first sequence, and the end: int64, shape (documents + 1,)

    @property
    def total_tokens(self) -> int:
        """Tokens in the .bin file."""
        return int(self.pointers[-1]) // self.dtype.itemsize + int(self.lengths[-1])

    def document_start(self, document: int) -> int:
        """Return the token with which a document starts; `total_tokens` after the last. O(1)."""
        sequence = int(self.documents[document])
        if sequence == len(self.pointers):
            return self.total_tokens
        return int(self.pointers[sequence]) // self.dtype.itemsize

    def find(self, token: int) -> Document:
        """Return the document that token number `token` belongs to. O(log sequences) reads."""
        assert 0 <= token < self.total_tokens, token
        # Empty sequences start where the next one does: of those the last one holds the token.
        sequence = bisect.bisect_right(self.pointers, token * self.dtype.itemsize) - 1
        number = bisect.bisect_right(self.documents, sequence) - 1
        return Document(number, self.document_start(number), self.document_start(number + 1))


def is_pair(path: Path) -> bool:
    """Return whether `path` is PREFIX, PREFIX.bin or PREFIX.idx of a pair, or lacks its .idx."""
    prefix = prefix_of(path)
    lacks_idx = path == prefix and Path(f"{prefix}.bin").is_file()
    return not path.is_dir() and (Path(f"{prefix}.idx").is_file() or lacks_idx)


def open_pair(path: Path) -> OpenSource:
    """Open a pair; its last documents are kept for validation."""
    index = read_index(path)
    file = TokenFile(index.bin_path, index.dtype, index.total_tokens)
    return OpenSource({"train": Tokens(file)}, index.find)


def prefix_of(path: Path | str) -> Path:
    """Return PREFIX of PREFIX, PREFIX.bin or PREFIX.idx."""
    path = Path(path)
    return path.with_suffix("") if path.suffix in (".bin", ".idx") else path


def read_index(prefix: Path | str) -> Index:
    """Open PREFIX.idx and check it against PREFIX.bin's size; `UsageError` if a file is damaged."""
    prefix = prefix_of(prefix)
    bin_path, idx_path = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
    try:
        bin_bytes, idx_bytes = bin_path.stat().st_size, idx_path.stat().st_size
        with open(idx_path, "rb") as file:
            header = file.read(HEADER.size)
    except OSError as error:
        raise UsageError(
            f"{error.filename}: cannot be read ({error.strerror}); Megatron's data is a pair "
            "PREFIX.bin and PREFIX.idx (a .bin of nanoGPT's is given with its suffix)"
        ) from None
    mark, version, code, sequences, bounds = HEADER.unpack(header.ljust(HEADER.size, b"\0"))
    _check(mark == MAGIC, idx_path, 0, mark, MAGIC)
    is_whole = len(header) == HEADER.size
    _check(is_whole, idx_path, len(header), "its end", f"a header of {HEADER.size} bytes")
    _check(version == 1, idx_path, 9, f"version {version}", "version 1")
    _check(code in CODES, idx_path, 17, f"type {code}", f"one of the integers' {list(CODES)}")
    pointers_at = HEADER.size + 4 * sequences
    documents_at = pointers_at + 8 * sequences
    end = documents_at + 8 * bounds
    is_whole = idx_bytes in (end, end + sequences)
    _check(is_whole, idx_path, idx_bytes, "its end", f"byte {end}, as its header says")
    _check(
        sequences and bounds and bin_bytes, bin_path, bin_bytes, "its end", "the end of some tokens"
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
        _check(modes[i] == 0, idx_path, end + i, f"mode {modes[i]} of sequence {i}", "0, text")
    # The first sequence starts at byte 0, each next one where the one before it ends.
    starts = {0: 0} | {i + 1: _end_of(index, i) for i in _sample(sequences - 1)}
    for i, start in starts.items():
        found, expected = f"start {index.pointers[i]} of sequence {i}", f"{start}, without a gap"
        _check(index.pointers[i] == start, idx_path, pointers_at + 8 * i, found, expected)
    end = _end_of(index, sequences - 1)
    _check(bin_bytes == end, bin_path, bin_bytes, "its end", f"byte {end}, as {idx_path.name} says")
    starts = index.documents
    is_sorted = all(starts[i] <= starts[i + 1] for i in _sample(bounds - 1))
    is_partition = is_sorted and starts[0] == 0 and starts[-1] == sequences
    found, expected = "documents out of order", f"a partition of its {sequences} sequences"
    _check(is_partition, idx_path, documents_at, found, expected)
    return index


def _check(ok: object, path: Path, byte: int, found: object, expected: object) -> None:
    if not ok:
        raise UsageError(
            f"{path}: has {found} at byte {byte}, not {expected}; copy the pair again, or build it "
            "again, as text and with --dataset-impl mmap"
        )


def _end_of(index: Index, sequence: int) -> int:
    """Return the byte of the .bin file at which a sequence ends."""
    return int(index.pointers[sequence]) + int(index.lengths[sequence]) * index.dtype.itemsize


def _sample(n: int) -> list[int]:
    """Return at most _SAMPLES of 0..n-1, evenly spaced, the first and last among them."""
    return sorted({i * (n - 1) // (_SAMPLES - 1) for i in range(_SAMPLES)}) if n else []
