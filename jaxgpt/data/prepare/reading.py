"""Text files and JSON lines as pieces that can be encoded by themselves, in flat memory."""

import codecs
import contextlib
import gzip
import itertools
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import BinaryIO

import numpy as np

from jaxgpt.config import UsageError
from jaxgpt.data.tokenizers.char import Tokenizer

_TEXT, _JSON, _COMPRESSED = (
    (".txt", ".text", ".md"),
    (".jsonl", ".ndjson", ".json"),
    (".gz", ".zst"),
)
_BLOCK = 1 << 18  # bytes that are read, and mostly encoded, at once
_TAIL = 8192  # bytes in which a place to cut is looked for
_LARGEST = 1 << 26  # bytes of text that have no such place
_CONTINUATION = bytes(range(0x80, 0xC0))  # the bytes of a UTF-8 character after its first


@dataclass(frozen=True)
class Piece:
    """A part of a file."""

    path: Path
    content: bytes
    start: int
    """Byte of the (decompressed) file with which it starts."""
    line: int
    """Number of its first line, from 1; only of JSON lines."""
    split: str | None
    """"train" or "val"; None for JSON lines, each of which is one or the other."""
    ends: bool
    """Whether a document ends with it; only of text."""
    position: int
    """Bytes of the file on disk up to its end, about."""


def input_files(inputs: list[Path]) -> tuple[list[Path], bool]:
    """Return the files to read, in order, and whether they are JSON lines.

    Args:
        inputs: files; or folders, of which all text files or all JSON lines are taken, sorted.

    Raises:
        UsageError: if there is nothing to read, or both kinds together.
    """
    files = []
    for path in inputs:
        if path.is_dir():
            # A .json that is not packed is more often a description than lines of documents.
            found = sorted(
                p
                for p in path.rglob("*")
                if _kind(p) in _TEXT + _JSON and p.suffix.lower() != ".json" and p.is_file()
            )
            if not found:
                kinds = ", ".join(_TEXT + _JSON)
                raise UsageError(f"--input {path}: has no files of {kinds} (or these with .gz)")
            files += found
        else:
            files.append(path)
    of_json = [_kind(path) in _JSON for path in files]
    if any(of_json) and not all(of_json):
        text, lines = files[of_json.index(False)], files[of_json.index(True)]
        raise UsageError(
            f"--input: {text} is text and {lines} is JSON lines; prepare each kind by itself, and "
            "mix them with data.blend"
        )
    return files, all(of_json)


def _kind(path: Path) -> str:
    name = Path(path.name.lower())
    return (name.with_suffix("") if name.suffix in _COMPRESSED else name).suffix


def _blocks(path: Path) -> Iterator[tuple[bytes, int]]:
    """Yield (content, bytes read on disk so far) of a file, decompressed."""
    try:
        with open(path, "rb") as file, _decompressed(file, path) as stream:
            while content := stream.read(_BLOCK):
                yield content, file.tell() if file.seekable() else 0  # a pipe
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"--input {path}: cannot be read ({error})") from None


def _decompressed(file: BinaryIO, path: Path) -> contextlib.AbstractContextManager[BinaryIO]:
    if path.suffix.lower() == ".gz":
        return gzip.GzipFile(fileobj=file)
    if path.suffix.lower() == ".zst":
        try:
            from compression import zstd
        except ImportError:
            raise UsageError(
                f"--input {path}: only Python 3.14 and newer read .zst; decompress it with zstd -d"
            ) from None
        return zstd.ZstdFile(file)
    return contextlib.nullcontext(file)


def part_texts(files: list[Path], val_share: float) -> list[int | None]:
    """Return the byte of each file from which on it is validation data; None without an end.

    It is the last `val_share` of the characters of all files, as nanoGPT parts a text.
    """
    characters = [sum(_characters(block) for block, _ in _blocks(path)) for path in files]
    training = int(sum(characters) * (1 - val_share))
    places = []
    for path, count in zip(files, characters, strict=True):
        places.append(_byte_of(path, training) if 0 < training < count else None if training else 0)
        training = max(0, training - count)
    return places


def _characters(content: bytes) -> int:
    return int(np.count_nonzero(np.frombuffer(content, np.uint8) & 0xC0 != 0x80))


def _byte_of(path: Path, character: int) -> int:
    """Return the byte at which a character of a file starts."""
    offset = 0
    for block, _ in _blocks(path):
        count = _characters(block)
        if character < count:
            starts = np.frombuffer(block, np.uint8) & 0xC0 != 0x80
            return offset + int(np.flatnonzero(starts)[character])
        character -= count
        offset += len(block)
    raise UsageError(f"--input {path}: has become shorter while it was read")


def text_pieces(path: Path, val_from: int | None, tokenizer: Tokenizer) -> Iterator[Piece]:
    """Yield a text file, cut where that does not change its tokens; the last piece is empty.

    Args:
        val_from: byte from which on it is validation data, if there is one.
    """
    start, split, position = 0, None, 0
    for split, blocks in itertools.groupby(_parts(path, val_from), itemgetter(0)):
        rest = bytearray()
        for _, content, position in blocks:
            rest += content
            if size := _cut(rest, tokenizer):
                yield Piece(path, bytes(rest[:size]), start, 0, split, False, position)
                start += size
                del rest[:size]
            elif len(rest) > _LARGEST:
                raise UsageError(
                    f"--input {path}: {len(rest)} bytes from byte {start} on have no place at "
                    "which this tokenizer's tokens do not depend on what follows; give the text "
                    "as JSON lines, one document each"
                )
        yield Piece(path, bytes(rest), start, 0, split, False, position)
        start += len(rest)
    if split is not None:
        yield Piece(path, b"", start, 0, split, True, position)


def _parts(path: Path, val_from: int | None) -> Iterator[tuple[str, bytes, int]]:
    """Yield (split, content, bytes read on disk so far) of a text file."""
    start = 0
    for content, position in _blocks(path):
        size = len(content) if val_from is None else max(0, val_from - start)
        if content[:size]:
            yield "train", content[:size], position
        if content[size:]:
            yield "val", content[size:], position
        start += len(content)


def _cut(content: bytearray, tokenizer: Tokenizer) -> int:
    """Return how many bytes of `content` can be encoded without what follows."""
    tail = bytes(content[-_TAIL:]).lstrip(_CONTINUATION)
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(tail)  # a last half character waits
    except UnicodeDecodeError:
        return len(content)  # for `texts_of` to name the byte
    size = tokenizer.cut(text)
    return len(content) - len(tail) + len(text[:size].encode()) if size else 0


def json_pieces(path: Path) -> Iterator[Piece]:
    """Yield a file of JSON lines, as pieces of whole lines."""
    start, line, rest, position = 0, 1, [], 0
    for content, position in _blocks(path):
        end = content.rfind(b"\n") + 1
        if end:
            whole = b"".join([*rest, content[:end]])
            yield Piece(path, whole, start, line, None, True, position)
            start += len(whole)
            line += whole.count(b"\n")
            rest = []
        rest.append(content[end:])
    yield Piece(path, b"".join(rest), start, line, None, True, position)


def texts_of(piece: Piece, json_key: str | None) -> list[str]:
    """Return the text of a piece, or of each of its JSON lines that is not empty.

    Raises:
        UsageError: naming the file and the byte or line of what is not UTF-8 or not such JSON.
    """
    if json_key is None:
        try:
            return [piece.content.decode()]
        except UnicodeDecodeError as error:
            raise UsageError(
                f"--input {piece.path}: is not UTF-8 text at byte {piece.start + error.start} "
                f"({error.reason}); convert it with iconv"
            ) from None
    texts = []
    for number, line in enumerate(piece.content.split(b"\n"), piece.line):
        if not line.strip():
            continue
        try:
            document = json.loads(line)
            text = document[json_key]
            if not isinstance(text, str):
                raise TypeError("not text")
            text.encode()  # half of a surrogate pair is JSON, but not text
        except UnicodeError as error:
            wrong = f"is not UTF-8 ({error})"
        except (ValueError, RecursionError) as error:
            wrong = f"is not JSON ({error}); JSON files need a document on each line"
        except (KeyError, TypeError):
            kinds = document.items() if isinstance(document, dict) else []
            keys = ", ".join(f"{k} ({type(v).__name__})" if k == json_key else k for k, v in kinds)
            keys = keys[:200] or type(document).__name__
            wrong = f"has no text under {json_key!r}, but {keys}; give --jsonl-key"
        else:
            texts += [text] if text else []
            continue
        raise UsageError(f"--input {piece.path}: line {number} {wrong}")
    return texts
