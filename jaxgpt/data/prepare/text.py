"""Tokenization of input files, one batch of text at a time."""

import hashlib
import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxgpt.config import UsageError
from jaxgpt.data.prepare.answers import encode_answers
from jaxgpt.data.prepare.files import PARQUET, TEXT, Advance, kind, read_lines, read_rows, read_text
from jaxgpt.data.prepare.json_lines import LineDocument, LineFormat, LineReader
from jaxgpt.data.tokenizers import CharTokenizer, Tokenizer

_BATCH = 1 << 21  # approximate number of characters to encode in parallel
_LARGEST = 1 << 26  # approximate limit on text without a split point, in characters


class TextChunk(NamedTuple):
    """A piece of text that can be encoded independently of the surrounding text."""

    split: str
    text: str
    ends: bool  # whether a document ends here
    document: LineDocument | None = None  # None for text files


class Encoded(NamedTuple):
    """A tokenized chunk."""

    chunk: TextChunk
    ids: np.ndarray  # int64 (tokens,)
    weights: np.ndarray | None
    """uint8 (tokens,): 1 for the tokens of answers, else 0. None means that all tokens count.

    The weight of a final end-of-text token is 1 if the document `ends_with_answer`, else 0.
    """


@dataclass(frozen=True)
class InputFile:
    """A file of the corpus.

    A text file is one document. In other files, each row or nonblank line is a document.
    """

    path: Path
    lines: LineFormat  # the format of JSON lines and Parquet rows
    val_share: float = 0.0  # probability that a document is selected for validation
    n_train: int | None = None  # number of training characters; if None, val_share applies

    def chunks(self, tokenizer: Tokenizer, advance: Advance) -> Iterator[TextChunk]:
        """Yield the text of the file in order, except for empty documents.

        `advance` is called with the number of bytes read from the file. If a text file is read
        twice, because its hash selects its split, the first time is not counted. Raises
        `UsageError` if a long text file cannot be split without changing its tokens.
        """
        if kind(self.path) is TEXT:
            yield from self._text_chunks(tokenizer, advance)
            return
        for document in self._documents(advance):
            if document.text:
                yield TextChunk(self._draw_split([document.text]), document.text, True, document)

    def _documents(self, advance: Advance) -> Iterator[LineDocument]:
        reader = LineReader(self.lines)
        if kind(self.path) is PARQUET:
            for number, row in read_rows(self.path, reader.possible_keys, advance):
                yield reader.read_value(row, f"--input {self.path}: row {number}")
        else:
            for number, line in read_lines(self.path, advance):
                yield reader.read(line, f"--input {self.path}: line {number}")

    def _draw_split(self, blocks: Iterable[str]) -> str:
        """Select a split by a hash of the text, so that copies of a document stay together."""
        if not self.val_share:
            return "train"
        digest = hashlib.blake2b(digest_size=8)
        for block in blocks:
            digest.update(block.encode())
        return "val" if int.from_bytes(digest.digest()) < self.val_share * 2**64 else "train"

    def _text_chunks(self, tokenizer: Tokenizer, advance: Advance) -> Iterator[TextChunk]:
        n_train, split = self.n_train, None
        blocks: list[str] = []  # the text since the last split point
        size = next_try = 0  # characters in `blocks`, and how many to have at the next try to split
        if n_train is None:  # the whole text goes to one split
            n_train = sys.maxsize if self._draw_split(read_text(self.path)) == "train" else 0
        for block in read_text(self.path, advance):
            for part_split, part in ("train", block[:n_train]), ("val", block[n_train:]):
                if not part:
                    continue
                if split not in (None, part_split):
                    yield TextChunk(split, "".join(blocks), False)
                    blocks, size, next_try = [], 0, 0
                split, size = part_split, size + len(part)
                blocks.append(part)
                if size < next_try:
                    continue
                text = "".join(blocks)
                if end := tokenizer.split_point(text):
                    yield TextChunk(split, text[:end], False)
                    blocks, size, next_try = [text[end:]], size - end, 0
                elif size > _LARGEST:
                    raise UsageError(
                        f"--input {self.path}: cannot split {size} characters of text without "
                        "changing the tokens of this tokenizer; give the text as JSON lines, "
                        "one document per line"
                    )
                else:  # joining the blocks after each one would take quadratic time
                    next_try = min(2 * size, _LARGEST + 1)
            n_train = max(0, n_train - len(block))
        if split is not None:
            yield TextChunk(split, "".join(blocks), True)


def characters_of(file: InputFile) -> set[str]:
    """Return the distinct characters in the text of a file."""
    out = set()
    for chunk in file.chunks(CharTokenizer(""), lambda size: None):
        out.update(chunk.text)
    return out


def encode_files(
    files: Iterable[InputFile], tokenizer: Tokenizer, advance: Advance
) -> Iterator[Encoded]:
    """Yield the tokens of files in order, one chunk at a time.

    If the tokenizer has an end-of-text token, it is added after each nonempty document, unless the
    document has answers and already ends with this token. In a document with answers, the
    end-of-text token counts toward the loss if the document `ends_with_answer`. Raises `UsageError`
    if a document with answers contains the end-of-text token before its end.
    """
    chunks = itertools.chain.from_iterable(file.chunks(tokenizer, advance) for file in files)
    for (has_answers, _), same in itertools.groupby(chunks, _kind):
        while batch := list(_take_batch(same)):
            for encoded in _encode_batch(batch, tokenizer, has_answers):
                yield _with_end(encoded, tokenizer.end_of_text)


def _kind(chunk: TextChunk) -> tuple[bool, bool]:
    """Return whether a chunk's document has answers and `has_special`.

    Chunks of one kind can be encoded together.
    """
    document = chunk.document
    has_answers = document is not None and document.answers is not None
    return has_answers, has_answers and document.has_special


def _encode_batch(
    chunks: Sequence[TextChunk], tokenizer: Tokenizer, has_answers: bool
) -> Iterator[Encoded]:
    if has_answers:
        documents = [chunk.document for chunk in chunks]
        for chunk, found in zip(chunks, encode_answers(documents, tokenizer), strict=True):
            yield Encoded(chunk, *found)
        return
    encoded = tokenizer.encode_batch([chunk.text for chunk in chunks])
    for chunk, ids in zip(chunks, encoded, strict=True):
        yield Encoded(chunk, ids, None)


def _with_end(encoded: Encoded, end_of_text: int | None) -> Encoded:
    """Append the end-of-text token, if any, to a chunk that ends a document."""
    chunk, ids, weights = encoded
    if end_of_text is None or not chunk.ends:
        return encoded
    if weights is not None:
        if ids.size and ids[-1] == end_of_text:
            ids, weights = ids[:-1], weights[:-1]
        if end_of_text in ids:
            raise UsageError(
                f"--input: the document {chunk.text[:60]!r}... contains the end-of-text token, "
                f"{end_of_text}, before its end, so it would be read as several documents; "
                "choose another token with --eos, such as <|endoftext|>"
            )
        weights = np.append(weights, np.uint8(chunk.document.ends_with_answer))
    return Encoded(chunk, np.append(ids, end_of_text), weights)


def _take_batch(chunks: Iterator[TextChunk]) -> Iterator[TextChunk]:
    """Yield chunks until their total length reaches _BATCH characters."""
    size = 0
    while size < _BATCH and (chunk := next(chunks, None)):
        yield chunk
        size += len(chunk.text)
