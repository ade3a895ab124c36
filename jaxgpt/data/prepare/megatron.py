"""Writer of Megatron-LM's indexed data sets, in the format that `data/megatron.py` reads."""

import os
import shutil
import tempfile
from pathlib import Path

import numpy as np

from jaxgpt.config import UsageError
from jaxgpt.data.megatron import BLOCK, CODES, HEADER, MAGIC, prefix_of


class MegatronWriter:
    """Writes PREFIX.bin and PREFIX.idx in flat memory, as a context.

    Neither is seen under its name before all is written, nor after an exception.

    >>> with MegatronWriter("corpus", np.uint16) as writer:
    ...     writer.add_document([5, 6, 7])
    """

    def __init__(self, prefix: Path | str, dtype: np.dtype | type):
        """Start files beside PREFIX, which replace a pair of that name when the context ends.

        Args:
            dtype: of the tokens, one of the integers that Megatron knows.
        """
        self._prefix = prefix_of(prefix)
        self._dtype = np.dtype(dtype).newbyteorder("<")
        codes = {np.dtype(name): code for code, name in CODES.items()}
        assert self._dtype in codes, dtype
        self._code = codes[self._dtype]
        self._sequences = 0
        self._documents = 0
        self._open = 0  # tokens of a document that has not ended

    def __enter__(self) -> "MegatronWriter":
        parent = self._prefix.parent
        parent.mkdir(parents=True, exist_ok=True)
        self._scratch = Path(tempfile.mkdtemp(dir=parent, prefix=f".{self._prefix.name}-"))
        self._bin = open(self._scratch / "bin", "wb")
        self._lengths = open(self._scratch / "lengths", "w+b")
        self._ends = open(self._scratch / "ends", "w+b")
        return self

    def add_document(self, tokens: np.ndarray, lengths: np.ndarray | None = None) -> None:
        """Append one document.

        Args:
            tokens: its token ids, shape (tokens,).
            lengths: tokens in each of its sequences; without it the document is one sequence.
        """
        assert not self._open, "the document before has not ended"
        lengths = np.array([len(tokens)] if lengths is None else lengths, np.int64)
        assert lengths.sum() == len(tokens), (lengths.sum(), len(tokens))
        self._add(tokens, lengths)
        self._end(np.array([self._sequences]))

    def append(self, tokens: np.ndarray, ends: np.ndarray) -> None:
        """Append tokens of documents that are one sequence each.

        Args:
            tokens: ids, with which the last document goes on if it has not ended.
            ends: numbers of these tokens, increasing, at which documents end; what follows the
                last one waits for the next call.
        """
        lengths = np.diff(ends, prepend=-self._open)
        first = self._sequences + 1
        self._add(tokens, lengths)
        self._end(np.arange(first, self._sequences + 1))
        self._open += len(tokens) - int(lengths.sum())

    def _add(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        tokens = np.asarray(tokens, None if len(tokens) else self._dtype)
        kind = np.iinfo(self._dtype)
        if len(tokens) and not kind.min <= tokens.min() <= tokens.max() <= kind.max:
            raise UsageError(
                f"{self._prefix}.bin: token ids from {tokens.min()} to {tokens.max()} do not fit "
                f"{self._dtype.name}; take a wider dtype"
            )
        if len(lengths) and lengths.max() > np.iinfo(np.int32).max:
            raise UsageError(
                f"{self._prefix}.idx: a sequence of {lengths.max()} tokens is longer than the "
                "format's 2,147,483,647; split the document"
            )
        self._bin.write(tokens.astype(self._dtype, copy=False).data)
        self._lengths.write(lengths.astype("<i4").data)
        self._sequences += len(lengths)

    def _end(self, ends: np.ndarray) -> None:
        self._ends.write(ends.astype("<i8").data)
        self._documents += len(ends)

    def __exit__(self, error: type[BaseException] | None, *_) -> None:
        try:
            if error is None:
                self._write_index()
            for file in (self._bin, self._lengths, self._ends):
                file.close()
            if error is None:
                idx_path = Path(f"{self._prefix}.idx")
                idx_path.unlink(missing_ok=True)  # the old one must not meet the new tokens
                os.replace(self._scratch / "bin", f"{self._prefix}.bin")
                os.replace(self._scratch / "idx", idx_path)
        finally:
            shutil.rmtree(self._scratch, ignore_errors=True)

    def _write_index(self) -> None:
        assert not self._open, "the last document has not ended"
        with open(self._scratch / "idx", "wb") as idx:
            idx.write(HEADER.pack(MAGIC, 1, self._code, self._sequences, self._documents + 1))
            self._lengths.seek(0)
            shutil.copyfileobj(self._lengths, idx)
            self._lengths.seek(0)
            start = 0
            while (lengths := np.fromfile(self._lengths, "<i4", BLOCK)).size:
                ends = start + np.cumsum(lengths, dtype="<i8") * self._dtype.itemsize
                idx.write(np.concatenate(([start], ends[:-1])).astype("<i8").data)
                start = int(ends[-1])
            idx.write(np.zeros(1, "<i8").data)
            self._ends.seek(0)
            shutil.copyfileobj(self._ends, idx)
