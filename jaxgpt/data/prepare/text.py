"""Convert text files and JSON lines to token files in constant memory."""

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
from jaxgpt.data.prepare.json_lines import LineDocument, LineFormat, LineReader
from jaxgpt.data.prepare.writer import megatron_writer, new_dataset, token_dtype
from jaxgpt.data.source import SPLITS
from jaxgpt.data.tokenizers import CharTokenizer, Tokenizer

_TEXT = (".txt", ".text", ".md")
_JSON = (".jsonl", ".ndjson", ".json")
_BLOCK = 1 << 16  # number of bytes of a text file to read (and usually encode) at once
_BATCH = 1 << 21  # approximate number of characters to encode in parallel
_LARGEST = 1 << 26  # approximate maximum number of characters without a split point
_MEGATRON_UINT16 = 65500  # smallest vocabulary that Megatron-LM stores as int32


class TextChunk(NamedTuple):
    """Text that can be encoded independently of the text around it."""

    split: str
    text: str
    ends: bool  # whether a document ends here
    document: LineDocument | None = None  # None for text files


class Encoded(NamedTuple):
    """A tokenized chunk."""

    chunk: TextChunk
    ids: np.ndarray  # int64 (tokens,)
    weights: np.ndarray | None  # uint8 (tokens,): 1 for tokens of answers; None if all count


@dataclass(frozen=True)
class Corpus:
    """Text files or JSON lines, to be split into training and validation data."""

    files: list[Path]
    lines: LineFormat | None  # the format of JSON lines; None for text files
    val_share: float | None  # share of characters or JSON lines; None puts everything in "train"

    def chunks(self, tokenizer: Tokenizer) -> Iterator[TextChunk]:
        """Yield the text of all files in order. Empty documents are left out.

        Raises:
            UsageError: if a file cannot be read, is not UTF-8 text or has an invalid line, or if a
                long text cannot be split without changing its tokens.
        """
        if self.lines is None:
            yield from self._text_chunks(tokenizer)
            return
        reader = LineReader(self.lines)
        for path in self.files:
            with _open(path) as stream:
                for number, line in enumerate(stream, 1):
                    if not line.strip():
                        continue
                    document = reader.read(line, f"--input {path}: line {number}")
                    if document.text:
                        yield TextChunk(
                            self._split_of(document.text), document.text, True, document
                        )

    def _split_of(self, text: str) -> str:
        """Choose a split by a hash of the text, so that copies of a document stay together."""
        drawn = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return "val" if int.from_bytes(drawn) < (self.val_share or 0) * 2**64 else "train"

    def _text_chunks(self, tokenizer: Tokenizer) -> Iterator[TextChunk]:
        """Yield chunks of text files. The last `val_share` of all characters goes to "val"."""
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
                        yield TextChunk(split, text, False)
                        text = ""
                    split, text = part_split, text + part
                    if size := tokenizer.split_point(text):
                        yield TextChunk(split, text[:size], False)
                        text = text[size:]
                    elif len(text) > _LARGEST:
                        raise UsageError(
                            f"--input {path}: cannot split {len(text)} characters of text without "
                            "changing the tokens of this tokenizer; give the text as JSON lines, "
                            "one document per line"
                        )
                n_train = max(0, n_train - len(block))
            if split is not None:
                yield TextChunk(split, text, True)


def input_files(inputs: Iterable[Path]) -> tuple[list[Path], bool]:
    """Return the files to read, with folders expanded, and whether they are JSON lines.

    In a folder, only files with the suffixes of text and JSON lines count, except .json.

    Raises:
        UsageError: if a path does not exist, a file is compressed with zstd, the files are neither
            all text nor all JSON lines, or there are no files.
    """
    files = []
    for path in inputs:
        if path.is_dir():
            # An uncompressed .json file is more likely to hold metadata than lines of documents.
            found = [
                p for p in path.rglob("*") if _kind(p) in (*_TEXT, *_JSON, ".zst") and p.is_file()
            ]
            files += sorted(p for p in found if p.suffix.lower() != ".json")
        elif path.exists():
            files.append(path)
        else:
            raise UsageError(f"--input {path}: cannot be read (no such file)")
    if packed := [path for path in files if path.suffix == ".zst"]:
        raise UsageError(f"--input {packed[0]}: zstd is not supported; decompress it with zstd -d")
    are_json = {_kind(path) in _JSON for path in files}
    if len(are_json) != 1:
        raise UsageError(
            f"--input {' '.join(map(str, inputs))}: must be only text files ({', '.join(_TEXT)}) "
            f"or only JSON lines ({', '.join(_JSON)}), which may be compressed (.gz); prepare text "
            "and JSON lines separately and mix them with data.blend"
        )
    return files, are_json.pop()


def write_nanogpt(
    corpus: Corpus, directory: Path, tokenizer: Tokenizer | None, source: str
) -> tuple[Tokenizer, Counter[str]]:
    """Write train.bin, val.bin and meta.json, with an end-of-text token between documents.

    If the tokenizer has no such token, there is nothing between documents. Documents with answers
    also get a loss mask. If `tokenizer` is None, each distinct character becomes a token.

    Returns:
        The tokenizer, and counts by name: "train" and "val" (tokens), "documents" and, with a loss
        mask, "train targets" and "val targets" (targets that count toward the loss).

    Raises:
        UsageError: if the input cannot be read or encoded, or has too few tokens, or if a document
            with answers contains the end-of-text token before its end.
        OSError: if `directory` cannot be written.
    """
    pipe = next((path for path in corpus.files if not path.is_file()), None)
    if pipe and (tokenizer is None or corpus.lines is None):
        raise UsageError(
            f"--input {pipe}: is not a regular file, but text files (and JSON lines with "
            "--tokenizer char) are read twice; write it to a regular file first"
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
        for chunk, ids, weights in encoded:
            split = chunk.split
            tokens[split].write(ids.astype(dtype).data)
            counts.update({split: ids.size, "documents": chunk.ends})
            if weights is not None:
                if split not in masks:
                    path = mask_path(scratch / f"{split}.bin")
                    masks[split] = files.enter_context(open(path, "wb"))
                masks[split].write(weights.data)
                counts[f"{split} targets"] += int(weights.sum())
        if min(counts[split] for split in SPLITS) < 2 or tokenizer.vocab_size < 2:
            raise UsageError(
                f"--input: {counts['train']} training tokens and {counts['val']} validation tokens "
                f"(--val-share {corpus.val_share:g}) with a vocabulary of {tokenizer.vocab_size} "
                "are too few; provide more text or change --val-share"
            )
    return tokenizer, counts


def join_documents(encoded: Iterable[Encoded], end_of_text: int) -> Iterator[Encoded]:
    """Insert an end-of-text token before every document of a split except the first.

    The token counts toward the loss if it follows an answer. If a document with answers already
    ends with this token, it does not get a second one.

    Raises:
        UsageError: if a document with answers contains the token before its end.
    """
    last: dict[str, TextChunk] = {}  # the previous chunk of each split
    for chunk, ids, weights in encoded:
        if weights is not None:
            if ids.size and ids[-1] == end_of_text:
                ids, weights = ids[:-1], weights[:-1]
            if end_of_text in ids:
                raise UsageError(
                    f"--input: the document {chunk.text[:60]!r}... contains the end-of-text token, "
                    f"{end_of_text}, before its end, so it would be read as several documents; "
                    "choose another token with --eos, such as <|endoftext|>"
                )
        before = last.get(chunk.split)
        if before is not None and before.ends:
            ids = np.concatenate([[end_of_text], ids])
            if weights is not None:
                counts = np.uint8(before.document.ends_with_answer)
                weights = np.concatenate([[counts], weights])
        last[chunk.split] = chunk
        yield Encoded(chunk, ids, weights)


def write_megatron(corpus: Corpus, prefix: Path, tokenizer: Tokenizer) -> Counter[str]:
    """Write PREFIX.bin and PREFIX.idx, with the tokenizer's end-of-text token after each document.

    Return counts by name: "train" (tokens) and "documents".

    Raises:
        UsageError: if the input cannot be read or encoded, or needs a loss mask.
        OSError: if the files cannot be written.
    """
    counts = Counter()
    dtype = np.uint16 if tokenizer.vocab_size < _MEGATRON_UINT16 else np.int32
    with megatron_writer(prefix, dtype) as add:
        for chunk, ids, weights in encode(corpus, tokenizer):
            if weights is not None:
                raise UsageError(
                    "--format megatron: cannot store the loss mask of prompts and messages; use "
                    "--format nanogpt"
                )
            if chunk.ends and tokenizer.end_of_text is not None:
                ids = np.append(ids, tokenizer.end_of_text)
            add(ids, chunk.ends)
            counts.update({"train": ids.size, "documents": chunk.ends})
    return counts


def encode(corpus: Corpus, tokenizer: Tokenizer) -> Iterator[Encoded]:
    """Yield each chunk with its token IDs, and show a progress bar on standard error.

    Raises `UsageError` as `Corpus.chunks` and `Tokenizer.encode` do.
    """
    every = 0.5 if sys.stderr.isatty() else 10  # seconds
    options = {"unit_scale": True, "delay": every, "mininterval": every, "leave": False}
    with tqdm(unit=" characters", **options) as bar:
        chunks = corpus.chunks(tokenizer)
        while batch := list(_take_batch(chunks)):
            yield from _encode_batch(batch, tokenizer)
            bar.update(sum(len(chunk.text) for chunk in batch))


def _encode_batch(chunks: Sequence[TextChunk], tokenizer: Tokenizer) -> Iterator[Encoded]:
    documents = [chunk.document for chunk in chunks]
    # A corpus has only one kind of document, so either all documents have answers or none do.
    if documents[0] is not None and documents[0].answers is not None:
        for chunk, found in zip(chunks, encode_answers(documents, tokenizer), strict=True):
            yield Encoded(chunk, *found)
        return
    encoded = tokenizer.encode_batch([chunk.text for chunk in chunks])
    for chunk, ids in zip(chunks, encoded, strict=True):
        yield Encoded(chunk, ids, None)


def _take_batch(chunks: Iterator[TextChunk]) -> Iterator[TextChunk]:
    """Yield the next chunks until they have at least _BATCH characters in total."""
    size = 0
    while size < _BATCH and (chunk := next(chunks, None)):
        yield chunk
        size += len(chunk.text)


def _char_tokenizer(corpus: Corpus) -> CharTokenizer:
    characters = set()
    for chunk in replace(corpus, val_share=None).chunks(CharTokenizer("")):
        characters.update(chunk.text)
    return CharTokenizer(characters)


def _kind(path: Path) -> str:
    return Path(path.name.lower().removesuffix(".gz")).suffix


@contextlib.contextmanager
def _open(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for reading, and decompress it if its name ends in .gz."""
    try:
        with (gzip.open if path.suffix.lower() == ".gz" else open)(path, "rb") as file:
            yield file
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"--input {path}: cannot be read ({in_words(error)})") from None


def _text_blocks(path: Path) -> Iterator[str]:
    """Yield the text of a file in blocks, without splitting a character."""
    decoder, start, block = codecs.getincrementaldecoder("utf-8")(), 0, b"."
    with _open(path) as stream:
        while block:
            block = stream.read(_BLOCK)
            waiting = len(decoder.getstate()[0])  # bytes of an incomplete character
            try:
                yield decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                raise UsageError(
                    f"--input {path}: is not UTF-8 text at byte {start - waiting + error.start} "
                    f"({error.reason}); convert it with iconv"
                ) from None
            start += len(block)
