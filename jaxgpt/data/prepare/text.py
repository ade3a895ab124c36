"""From text to token files: pieces encoded by many processes, written in order, in flat memory."""

import collections
import contextlib
import hashlib
import multiprocessing
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jaxgpt.cluster.shutdown import FAILED, end_process
from jaxgpt.config import UsageError
from jaxgpt.data.prepare.megatron import MegatronWriter
from jaxgpt.data.prepare.reading import Piece, json_pieces, part_texts, text_pieces, texts_of
from jaxgpt.data.prepare.writer import new_dataset, token_dtype
from jaxgpt.data.tokenizers.char import CharTokenizer, Tokenizer

_IN_PROCESS = 1 << 21  # bytes of input up to which other processes are not worth their start
_MEGATRON_UINT16 = 65500  # smallest vocabulary that Megatron-LM writes as int32


@dataclass(frozen=True)
class Corpus:
    """The texts of some files, and what becomes of them."""

    files: list[Path]
    json_key: str | None
    """Of the JSON lines in all files; None where they are text."""
    val_share: float | None
    """None to keep all in one split, "train"."""

    def pieces(self, tokenizer: Tokenizer) -> Iterator[Piece]:
        """Yield all files, cut so that each piece can be encoded by itself."""
        if self.json_key is not None:
            for path in self.files:
                yield from json_pieces(path)
            return
        places = [None] * len(self.files)
        if self.val_share is not None:
            places = part_texts(self.files, self.val_share)
        for path, val_from in zip(self.files, places, strict=True):
            yield from text_pieces(path, val_from, tokenizer)


@dataclass
class EncodeStats:
    """What was written of a corpus."""

    tokenizer: Tokenizer
    bytes: int = 0
    tokens: dict[str, int] = field(default_factory=collections.Counter)
    """By split."""
    documents: dict[str, int] = field(default_factory=collections.Counter)
    seconds: float = 0.0


@dataclass(frozen=True)
class TokenizeWorker:
    """Piece -> (ids, numbers of the ids at which documents end) of each split."""

    tokenizer: Tokenizer
    json_key: str | None
    val_share: float | None
    dtype: np.dtype

    def __call__(self, piece: Piece) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        texts = texts_of(piece, self.json_key)
        of_split = collections.defaultdict(list)
        for text in texts:
            of_split[piece.split or self._split(text)].append(text)
        return {split: self._encoded(texts, piece.ends) for split, texts in of_split.items()}

    def _split(self, text: str) -> str:
        """Choose by the text alone, so that a document and its copies are on one side."""
        if self.val_share is None:
            return "train"
        drawn = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return "val" if int.from_bytes(drawn) < self.val_share * 2**64 else "train"

    def _encoded(self, texts: list[str], ends: bool) -> tuple[np.ndarray, np.ndarray]:
        end_of_text = self.tokenizer.end_of_text
        mark = np.array([] if end_of_text is None or not ends else [end_of_text], self.dtype)
        documents = []
        for text in texts:
            documents.append(self.tokenizer.encode(text).astype(self.dtype))
            documents.append(mark)
        lengths = [len(documents[i]) + len(mark) for i in range(0, len(documents), 2)]
        return np.concatenate(documents), np.cumsum(lengths if ends else [], dtype=np.int64)


@dataclass(frozen=True)
class CharVocabScan:
    """Piece -> the set of its characters."""

    json_key: str | None

    def __call__(self, piece: Piece) -> set[str]:
        return set().union(*texts_of(piece, self.json_key))


def write_nanogpt(
    corpus: Corpus, directory: Path, tokenizer: Tokenizer | None, workers: int, source: str
) -> EncodeStats:
    """Write train.bin, val.bin and meta.json, with end-of-text between documents.

    Args:
        tokenizer: None for one token per character that occurs.
        workers: processes that encode.
        source: where the text came from, for people.

    Raises:
        UsageError: for files that cannot be read, or too little text.
    """
    if tokenizer is None or corpus.json_key is None:
        _check_lasting(corpus)
    tokenizer = tokenizer or _characters_of(corpus, workers)
    dtype = token_dtype(tokenizer.vocab_size)
    with new_dataset(directory, tokenizer, source) as scratch, contextlib.ExitStack() as stack:
        files = {s: stack.enter_context(open(scratch / f"{s}.bin", "wb")) for s in ("train", "val")}
        unmarked = dict.fromkeys(files, True)

        def write(split: str, tokens: np.ndarray, ends: np.ndarray) -> None:
            files[split].write(tokens.data)
            if len(tokens):
                unmarked[split] = not len(ends) or int(ends[-1]) < len(tokens)

        written = _write(corpus, tokenizer, dtype, workers, write)
        for split, file in files.items():
            if tokenizer.end_of_text is not None and not unmarked[split]:
                file.truncate(file.tell() - dtype.itemsize)  # it stands between documents
                written.tokens[split] -= 1
        _check_enough(written, corpus)
        stack.close()  # the files are complete before they are described
    return written


def write_megatron(corpus: Corpus, prefix: Path, tokenizer: Tokenizer, workers: int) -> EncodeStats:
    """Write PREFIX.bin and PREFIX.idx, with end-of-text after each document.

    Raises:
        UsageError: for files that cannot be read.
    """
    dtype = np.dtype("<u2" if tokenizer.vocab_size < _MEGATRON_UINT16 else "<i4")
    with MegatronWriter(prefix, dtype) as writer:
        return _write(
            corpus, tokenizer, dtype, workers, lambda _, tokens, ends: writer.append(tokens, ends)
        )


def _check_lasting(corpus: Corpus) -> None:
    """Check that files can be read twice: for their characters, or for the part to validate on."""
    for path in corpus.files:
        if path.exists() and not path.is_file():
            raise UsageError(
                f"--input {path}: is not a regular file, and text, or what --tokenizer char is to "
                "split, is read twice; write it to a file first, or give JSON lines and another "
                "--tokenizer"
            )


def _characters_of(corpus: Corpus, workers: int) -> CharTokenizer:
    characters = set()
    pieces = Corpus(corpus.files, corpus.json_key, None).pieces(CharTokenizer(""))
    for _, found in _in_order(CharVocabScan(corpus.json_key), pieces, _of(corpus, workers)):
        characters |= found
    return CharTokenizer(sorted(characters))


def _write(
    corpus: Corpus,
    tokenizer: Tokenizer,
    dtype: np.dtype,
    workers: int,
    write: Callable[[str, np.ndarray, np.ndarray], None],
) -> EncodeStats:
    encoder = TokenizeWorker(tokenizer, corpus.json_key, corpus.val_share, dtype)
    written, start = EncodeStats(tokenizer), time.monotonic()
    progress = Progress(corpus.files)
    for piece, of_split in _in_order(encoder, corpus.pieces(tokenizer), _of(corpus, workers)):
        for split, (tokens, ends) in sorted(of_split.items()):
            write(split, tokens, ends)
            written.tokens[split] += len(tokens)
            written.documents[split] += len(ends)
        written.bytes += len(piece.content)
        written.seconds = time.monotonic() - start
        progress.show(piece, written)
    progress.close()
    return written


def _of(corpus: Corpus, workers: int) -> int:
    """Return the processes that are worth their start."""
    return workers if sum(_size(path) for path in corpus.files) > _IN_PROCESS else 1


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise UsageError(f"--input {path}: cannot be read ({error.strerror})") from None


def _check_enough(written: EncodeStats, corpus: Corpus) -> None:
    tokens, vocab_size = written.tokens, written.tokenizer.vocab_size
    if min(tokens["train"], tokens["val"]) < 2 or vocab_size < 2:
        raise UsageError(
            f"--input: {tokens['train']} tokens to train on and {tokens['val']} to validate with "
            f"(--val-share {corpus.val_share:g}), of a vocabulary of {vocab_size}, are too few; "
            "give more text, or another --val-share"
        )


def _in_order(
    function: Callable[[Piece], Any], pieces: Iterable[Piece], workers: int
) -> Iterator[tuple[Piece, Any]]:
    """Yield (piece, function(piece)) in the order of the pieces, some of them under way."""
    if workers == 1:
        for piece in pieces:
            yield piece, function(piece)
        return
    # Not forked: a fork of a process with threads can hang.
    spawn = multiprocessing.get_context("spawn")
    waiting = collections.deque()
    with ProcessPoolExecutor(workers, spawn, _begin) as pool:
        try:
            for piece in pieces:
                waiting.append((piece, pool.submit(function, piece)))
                if len(waiting) > 3 * workers:
                    piece, result = waiting.popleft()
                    yield piece, result.result()
            for piece, result in waiting:
                yield piece, result.result()
        except BrokenProcessPool:
            raise UsageError(
                f"--workers {workers}: one of the processes was killed, maybe for want of memory; "
                "use fewer"
            ) from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _begin() -> None:
    """Prepare a process that encodes: it ends with the first one, and only so."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process ends the others

    def end_with_parent() -> None:
        multiprocessing.parent_process().join()
        end_process(FAILED)

    threading.Thread(target=end_with_parent, daemon=True).start()


class Progress:
    """How far it is, on standard error: rewritten on a terminal, a line at times in a log."""

    def __init__(self, files: list[Path]):
        self._on_terminal = sys.stderr.isatty()
        self._every = 0.5 if self._on_terminal else 10  # seconds
        self._start = self._shown = time.monotonic()
        self._before = dict(zip(files, np.cumsum([0, *map(_size, files)]).tolist(), strict=False))
        self._total = sum(map(_size, files))

    def show(self, piece: Piece, written: EncodeStats) -> None:
        """Say that all up to `piece` is written, if it is time to say so."""
        now = time.monotonic()
        if now - self._shown < self._every:
            return
        self._shown = now
        passed = now - self._start
        done = (self._before[piece.path] + piece.position) / max(self._total, 1)
        line = (
            f"{done:4.0%} {written.bytes / 1e6:,.0f} MB {rates(written)}, "
            f"{passed * (1 - done) / max(done, 1e-9) / 60:.1f} minutes left"
        )
        if self._on_terminal:
            print(f"\r{line}\033[K", end="", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._on_terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def rates(written: EncodeStats) -> str:
    """Return MB and tokens per second, for people."""
    seconds = max(written.seconds, 1e-9)
    tokens = sum(written.tokens.values())
    return f"{written.bytes / 1e6 / seconds:,.1f} MB/s {tokens / seconds:,.0f} tokens/s"
