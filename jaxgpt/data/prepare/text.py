"""Text files and JSON lines to token files, read and encoded in flat memory."""

import codecs
import contextlib
import gzip
import hashlib
import sys
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
from tqdm import tqdm

from jaxgpt.config import UsageError, in_words
from jaxgpt.data.nanogpt import mask_path
from jaxgpt.data.prepare.answers import encode_answers
from jaxgpt.data.prepare.json_lines import Document, LineFormat, LineReader
from jaxgpt.data.prepare.writer import megatron_writer, new_dataset, token_dtype
from jaxgpt.data.source import SPLITS
from jaxgpt.data.tokenizers import CharTokenizer, Tokenizer

_TEXT = (".txt", ".text", ".md")
_JSON = (".jsonl", ".ndjson", ".json")
_BLOCK = 1 << 16  # bytes of a text file that are read, and mostly encoded, at once
_BATCH = 1 << 21  # characters that are encoded in parallel
_LARGEST = 1 << 26  # characters of text without a place at which it can be split
_MEGATRON_UINT16 = 65500  # smallest vocabulary that Megatron-LM writes as int32


class Piece(NamedTuple):
    """Text that can be encoded by itself; a document ends with it if `ends`."""

    split: str
    text: str
    ends: bool
    document: Document | None = None  # what a JSON line says of the text


class Encoded(NamedTuple):
    """A piece in tokens."""

    piece: Piece
    ids: np.ndarray  # int64 (tokens,)
    weights: np.ndarray | None  # uint8 (tokens,): 1 for those of answers; None if all count


@dataclass(frozen=True)
class Corpus:
    """The texts of some files, and how they are divided into training and validation."""

    files: list[Path]
    lines: LineFormat | None  # of JSON lines; None if the files are text
    val_share: float | None  # of characters of text, or of JSON lines; None for "train" alone

    def pieces(self, tokenizer: Tokenizer) -> Iterator[Piece]:
        """Yield all text in order; `UsageError` names the byte or line that cannot be read."""
        if self.lines is None:
            yield from self._text_pieces(tokenizer)
            return
        reader = LineReader(self.lines)
        for path in self.files:
            with _open(path) as stream:
                for number, line in enumerate(stream, 1):
                    if not line.strip():
                        continue
                    document = reader.read(line, f"--input {path}: line {number}")
                    if document.text:
                        yield Piece(self._split_of(document.text), document.text, True, document)

    def _split_of(self, text: str) -> str:
        """Choose by the text alone, so that a document and its copies are on one side."""
        drawn = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return "val" if int.from_bytes(drawn) < (self.val_share or 0) * 2**64 else "train"

    def _text_pieces(self, tokenizer: Tokenizer) -> Iterator[Piece]:
        """Keep the last `val_share` of all characters for validation, as nanoGPT does."""
        n_train = sys.maxsize
        if self.val_share is not None:
            total = sum(len(block) for path in self.files for block in _text_blocks(path))
            n_train = int(total * (1 - self.val_share))
        for path in self.files:
            split, text = None, ""
            for block in _text_blocks(path):
                for part_split, part in ("train", block[:n_train]), ("val", block[n_train:]):
                    if not part:
                        continue
                    if split not in (None, part_split):
                        yield Piece(split, text, False)
                        text = ""
                    split, text = part_split, text + part
                    if size := tokenizer.split_point(text):
                        yield Piece(split, text[:size], False)
                        text = text[size:]
                    elif len(text) > _LARGEST:
                        raise UsageError(
                            f"--input {path}: {len(text)} characters have no place at which this "
                            "tokenizer's tokens do not depend on what follows; give the text as "
                            "JSON lines, one document each"
                        )
                n_train = max(0, n_train - len(block))
            if split is not None:
                yield Piece(split, text, True)


def input_files(inputs: Iterable[Path]) -> tuple[list[Path], bool]:
    """Return the files to read, those of a folder sorted, and whether they are JSON lines."""
    files = []
    for path in inputs:
        if path.is_dir():
            # A .json that is not packed is more often a description than lines of documents.
            found = [
                p for p in path.rglob("*") if _kind(p) in (*_TEXT, *_JSON, ".zst") and p.is_file()
            ]
            files += sorted(p for p in found if p.suffix.lower() != ".json")
        elif path.exists():
            files.append(path)
        else:
            raise UsageError(f"--input {path}: cannot be read (no such file)")
    if packed := [path for path in files if path.suffix == ".zst"]:
        raise UsageError(f"--input {packed[0]}: cannot be read packed; unpack it with zstd -d")
    are_json = {_kind(path) in _JSON for path in files}
    if len(are_json) != 1:
        raise UsageError(
            f"--input {' '.join(map(str, inputs))}: must be text files ({', '.join(_TEXT)}), or "
            f"JSON lines ({', '.join(_JSON)}), or folders of one kind, also with .gz; prepare each "
            "kind by itself, and mix them with data.blend"
        )
    return files, are_json.pop()


def write_nanogpt(
    corpus: Corpus, directory: Path, tokenizer: Tokenizer | None, source: str
) -> tuple[Tokenizer, Counter[str]]:
    """Write train.bin, val.bin and meta.json, with end-of-text between documents.

    Documents with answers also get a loss mask. Without a `tokenizer`, it is one token per
    character that occurs. Returns the tokenizer, and the tokens of each split, its "SPLIT targets"
    if there is a mask, and the number of "documents".
    """
    pipe = next((path for path in corpus.files if not path.is_file()), None)
    if pipe and (tokenizer is None or corpus.lines is None):
        raise UsageError(
            f"--input {pipe}: is not a regular file, and text, and all by --tokenizer char, is "
            "read twice; write it to a file first"
        )
    tokenizer = tokenizer or _char_tokenizer(corpus)
    dtype = token_dtype(tokenizer.vocab_size)
    counts = Counter()
    with (
        new_dataset(directory, tokenizer, source) as scratch,
        contextlib.ExitStack() as files,
    ):
        tokens = {s: files.enter_context(open(scratch / f"{s}.bin", "wb")) for s in SPLITS}
        masks: dict[str, IO[bytes]] = {}
        encoded = encode(corpus, tokenizer)
        if tokenizer.end_of_text is not None:
            encoded = join_documents(encoded, tokenizer.end_of_text)
        for piece, ids, weights in encoded:
            split = piece.split
            tokens[split].write(ids.astype(dtype).data)
            counts.update({split: ids.size, "documents": piece.ends})
            if weights is not None:
                if split not in masks:
                    path = mask_path(scratch / f"{split}.bin")
                    masks[split] = files.enter_context(open(path, "wb"))
                masks[split].write(weights.data)
                counts[f"{split} targets"] += int(weights.sum())
        if min(counts[split] for split in SPLITS) < 2 or tokenizer.vocab_size < 2:
            raise UsageError(
                f"--input: {counts['train']} tokens to train on and {counts['val']} to "
                f"validate with (--val-share {corpus.val_share:g}), of a vocabulary of "
                f"{tokenizer.vocab_size}, are too few; give more text, or another --val-share"
            )
    return tokenizer, counts


def join_documents(encoded: Iterable[Encoded], end_of_text: int) -> Iterator[Encoded]:
    """Put end-of-text between the documents of each split: before all but the first.

    It counts in the loss after an answer. A document with answers that ends with this token does
    not get another. Raises `UsageError` if the token is elsewhere in such a document.
    """
    last: dict[str, Piece] = {}  # the piece before, of each split
    for piece, ids, weights in encoded:
        if weights is not None:
            if ids.size and ids[-1] == end_of_text:
                ids, weights = ids[:-1], weights[:-1]
            if end_of_text in ids:
                raise UsageError(
                    f"--input: the document {piece.text[:60]!r}... has the end-of-text token, "
                    f"{end_of_text}, before its end, so that it would be taken for several "
                    "documents; give --eos another token, such as <|endoftext|>"
                )
        before = last.get(piece.split)
        if before is not None and before.ends:
            ids = np.concatenate([[end_of_text], ids])
            if weights is not None:
                counts = np.uint8(before.document.ends_with_answer)
                weights = np.concatenate([[counts], weights])
        last[piece.split] = piece
        yield Encoded(piece, ids, weights)


def write_megatron(corpus: Corpus, prefix: Path, tokenizer: Tokenizer) -> Counter[str]:
    """Write PREFIX.bin and PREFIX.idx, with end-of-text after each document; return counts."""
    counts = Counter()
    dtype = np.uint16 if tokenizer.vocab_size < _MEGATRON_UINT16 else np.int32
    with megatron_writer(prefix, dtype) as add:
        for piece, ids, weights in encode(corpus, tokenizer):
            if weights is not None:
                raise UsageError(
                    "--format megatron: has no loss mask for prompts and messages; use --format "
                    "nanogpt"
                )
            if piece.ends and tokenizer.end_of_text is not None:
                ids = np.append(ids, tokenizer.end_of_text)
            add(ids, piece.ends)
            counts.update({"train": ids.size, "documents": piece.ends})
    return counts


def encode(corpus: Corpus, tokenizer: Tokenizer) -> Iterator[Encoded]:
    """Yield each piece in tokens, with progress on standard error."""
    every = 0.5 if sys.stderr.isatty() else 10  # seconds
    options = {"unit_scale": True, "delay": every, "mininterval": every, "leave": False}
    with tqdm(unit=" characters", **options) as bar:
        pieces = corpus.pieces(tokenizer)
        while batch := list(_take(pieces)):
            yield from _encode_batch(batch, tokenizer)
            bar.update(sum(len(piece.text) for piece in batch))


def _encode_batch(pieces: Sequence[Piece], tokenizer: Tokenizer) -> Iterator[Encoded]:
    documents = [piece.document for piece in pieces]
    if documents[0] is not None and documents[0].answers is not None:  # so have the others
        for piece, found in zip(pieces, encode_answers(documents, tokenizer), strict=True):
            yield Encoded(piece, *found)
        return
    encoded = tokenizer.encode_batch([piece.text for piece in pieces])
    for piece, ids in zip(pieces, encoded, strict=True):
        yield Encoded(piece, ids, None)


def _take(pieces: Iterator[Piece]) -> Iterator[Piece]:
    """Yield the next pieces of _BATCH characters together."""
    size = 0
    while size < _BATCH and (piece := next(pieces, None)):
        yield piece
        size += len(piece.text)


def _char_tokenizer(corpus: Corpus) -> CharTokenizer:
    characters = set()
    for piece in replace(corpus, val_share=None).pieces(CharTokenizer("")):
        characters.update(piece.text)
    return CharTokenizer(characters)


def _kind(path: Path) -> str:
    return Path(path.name.lower().removesuffix(".gz")).suffix


@contextlib.contextmanager
def _open(path: Path) -> Iterator[IO[bytes]]:
    """Open a file, decompressed."""
    try:
        with (gzip.open if path.suffix.lower() == ".gz" else open)(path, "rb") as file:
            yield file
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"--input {path}: cannot be read ({in_words(error)})") from None


def _text_blocks(path: Path) -> Iterator[str]:
    """Yield a text file in blocks of whole characters."""
    decoder, start, block = codecs.getincrementaldecoder("utf-8")(), 0, b"."
    with _open(path) as stream:
        while block:
            block = stream.read(_BLOCK)
            waiting = len(decoder.getstate()[0])  # bytes of a character that goes on
            try:
                yield decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                raise UsageError(
                    f"--input {path}: is not UTF-8 text at byte {start - waiting + error.start} "
                    f"({error.reason}); convert it with iconv"
                ) from None
            start += len(block)
