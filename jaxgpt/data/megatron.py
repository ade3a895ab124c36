"""Megatron-LM's indexed data sets: PREFIX.bin and PREFIX.idx, read without torch.

PREFIX.bin is all tokens, one sequence after the other. PREFIX.idx, little-endian, is

    9 bytes "MMIDIDX\\0\\0", uint64 version 1, uint8 code of the tokens' dtype,
    uint64 number of sequences S, uint64 number of documents + 1,
    int32[S] tokens in each sequence, int64[S] byte at which each sequence starts,
    int64[documents + 1] sequence with which each document starts, and S at the end,
    int8[S] modes, only in multimodal data: 0 where a sequence is text

as in Megatron-LM's megatron/core/datasets/indexed_dataset.py and in Megatron-DeepSpeed's
megatron/data/indexed_dataset.py ("mmap"). The arrays start at odd places of the file, where
NumPy works on copies of whole arrays; so here they are read element by element, or in blocks.
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
_FLOAT_CODES = {6: "float64", 7: "float32"}
_SAMPLES = 64  # sequences and documents that `read_index` looks at, whatever their number
BLOCK = 1 << 20  # elements


@dataclass(frozen=True)
class Index:
    """What a .idx file says about the tokens in its .bin file."""

    bin_path: Path
    idx_path: Path
    dtype: np.dtype
    """Of the tokens, little-endian."""
    lengths: np.ndarray
    """Tokens in each sequence: int32, shape (sequences,), a memory map."""
    pointers: np.ndarray
    """Byte of the .bin file at which each sequence starts: int64, shape (sequences,), a memory
    map."""
    documents: np.ndarray
    """Sequence with which each document starts, and the number of sequences: int64, shape
    (documents + 1,), a memory map."""

    @property
    def total_tokens(self) -> int:
        """Tokens in the .bin file."""
        return int(self.pointers[-1]) // self.dtype.itemsize + int(self.lengths[-1])

    @property
    def document_count(self) -> int:
        """Documents, empty ones among them."""
        return len(self.documents) - 1

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
    return OpenSource({"train": Tokens([file])}, index.find)


def prefix_of(path: Path | str) -> Path:
    """Return PREFIX of PREFIX, PREFIX.bin or PREFIX.idx."""
    path = Path(path)
    return path.with_suffix("") if path.suffix in (".bin", ".idx") else path


def read_index(prefix: Path | str) -> Index:
    """Open PREFIX.idx, and check it against PREFIX.bin without reading tokens.

    Args:
        prefix: PREFIX, with or without `.bin` or `.idx`.

    Raises:
        UsageError: if a file is missing, truncated or of another format, if the tokens are not
            integers, or if the sequences do not follow one another in the .bin file.
    """
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
    dtype, sequences, documents = _read_header(idx_path, header)
    pointers_at = HEADER.size + 4 * sequences
    documents_at = pointers_at + 8 * sequences
    end = documents_at + 8 * documents
    if idx_bytes not in (end, end + sequences):
        raise UsageError(
            f"{idx_path}: ends at byte {idx_bytes}, but {sequences} sequences and "
            f"{documents - 1} documents, as its header says, end at byte {end}; it is "
            "truncated or damaged: copy or build it again"
        )
    if not sequences or not documents or not bin_bytes:
        raise UsageError(f"{bin_path}: holds no tokens")
    index = Index(
        bin_path,
        idx_path,
        dtype,
        np.asarray(np.memmap(idx_path, "<i4", "r", HEADER.size, (sequences,))),
        np.asarray(np.memmap(idx_path, "<i8", "r", pointers_at, (sequences,))),
        np.asarray(np.memmap(idx_path, "<i8", "r", documents_at, (documents,))),
    )
    if idx_bytes == end + sequences:
        _check_modes(idx_path, end, sequences)
    _check_order(index, bin_bytes, pointers_at, documents_at)
    return index


def _read_header(idx_path: Path, header: bytes) -> tuple[np.dtype, int, int]:
    """Return (dtype, sequences, documents + 1) of the first bytes of a .idx file."""
    if header.startswith(b"TNTIDX"):
        raise UsageError(
            f"{idx_path}: is of Megatron's older kind (lazy or cached) at byte 0; build it again "
            "with --dataset-impl mmap"
        )
    if not header.startswith(MAGIC):
        raise UsageError(
            f"{idx_path}: has {header[:9]!r} at byte 0 where an index of Megatron-LM has "
            f"{MAGIC!r}; give the prefix of a Megatron data set"
        )
    if len(header) < HEADER.size:
        raise UsageError(
            f"{idx_path}: ends at byte {len(header)}, within its header of {HEADER.size} bytes; "
            "copy or build it again"
        )
    _, version, code, sequences, documents = HEADER.unpack(header)
    if version != 1:
        raise UsageError(f"{idx_path}: is of version {version} at byte 9; only 1 can be read")
    if code not in CODES:
        kind = _FLOAT_CODES.get(code, f"unknown code {code}")
        raise UsageError(
            f"{idx_path}: says at byte 17 that the tokens are {kind}; token ids are integers"
        )
    return np.dtype(CODES[code]), sequences, documents


def _check_modes(idx_path: Path, start: int, sequences: int) -> None:
    """Refuse multimodal data in which anything but text is found."""
    with open(idx_path, "rb") as file:
        file.seek(start)
        for first in range(0, sequences, BLOCK):
            modes = np.fromfile(file, np.int8, min(BLOCK, sequences - first))
            if modes.any():
                at = first + int(modes.argmax())
                raise UsageError(
                    f"{idx_path}: sequence {at} has mode {modes[at - first]} at byte {start + at},"
                    " which is not text; a GPT is trained on text only"
                )


def _check_order(index: Index, bin_bytes: int, pointers_at: int, documents_at: int) -> None:
    """Refuse an index whose sequences do not fill the .bin file one after the other."""
    count = len(index.pointers)
    end = _end_of(index, count - 1)
    if end != bin_bytes:
        raise UsageError(
            f"{index.bin_path}: ends at byte {bin_bytes}, but by {index.idx_path.name} its last "
            f"sequence ends at byte {end}; copy or build it again"
        )
    # The first of the pointers, then a sample of those that the sequence before it ends at.
    for i, start in [(0, 0)] + [(i + 1, _end_of(index, i)) for i in _sample(count - 1)]:
        if index.pointers[i] != start:
            raise UsageError(
                f"{index.idx_path}: says at byte {pointers_at + 8 * i} that sequence {i} starts "
                f"at byte {index.pointers[i]} of the tokens, not at {start}, where those before "
                "it end; only data without gaps, as Megatron builds it, can be read"
            )
    documents = index.documents
    wrong = [i for i in _sample(len(documents) - 1) if documents[i] > documents[i + 1]]
    if documents[0] or documents[-1] != count or wrong:
        raise UsageError(
            f"{index.idx_path}: its documents, from byte {documents_at} on, do not part its "
            f"{count} sequences; build it again"
        )


def _end_of(index: Index, sequence: int) -> int:
    """Return the byte of the .bin file at which a sequence ends."""
    return int(index.pointers[sequence]) + int(index.lengths[sequence]) * index.dtype.itemsize


def _sample(n: int) -> list[int]:
    """Return at most _SAMPLES of 0..n-1, evenly spaced, the first and last among them."""
    return sorted({i * (n - 1) // (_SAMPLES - 1) for i in range(_SAMPLES)}) if n else []
