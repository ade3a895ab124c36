"""Finding and reading input files: text, JSON lines and Parquet."""

import codecs
import contextlib
import gzip
import io
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from jaxgpt.config import UsageError, in_words

TEXT = (".txt", ".text", ".md")
JSON = (".jsonl", ".ndjson", ".json")
PARQUET = (".parquet",)
_BLOCK = 1 << 16  # number of bytes to read from a text file at a time

Advance = Callable[[int], object]  # called with the number of bytes read


def kind(path: Path) -> tuple[str, ...]:
    """Return `JSON` or `PARQUET`, whichever contains the file's suffix, or `TEXT` if neither does.

    The suffix .gz and the case of the suffix are ignored.
    """
    suffix = Path(path.name.lower().removesuffix(".gz")).suffix
    return next((found for found in (JSON, PARQUET) if suffix in found), TEXT)


def find_files(inputs: Iterable[Path]) -> tuple[list[Path], list[Path]]:
    """Return the input files, and the files in input folders that have an unknown suffix.

    The input files include all regular files with a suitable suffix in the input folders. Suitable
    suffixes are those in `TEXT`, `JSON` and `PARQUET`, with or without .gz, but not .json without
    .gz. Input folders are searched recursively. Hidden files, hidden subfolders, unreadable
    subfolders and symbolic links to folders are skipped. The files of a folder are sorted by path.

    Raises:
        UsageError: if a path does not exist or cannot be accessed, if a folder has no suitable
            files, or if a file name ends in .zst.
    """
    files, ignored = [], []
    for path in inputs:
        try:
            is_missing, is_folder = not path.exists(), path.is_dir()
            inside = _files_in(path) if is_folder else []
        except OSError as error:
            raise UsageError(f"--input {path}: cannot be read ({in_words(error)})") from None
        if is_missing:
            raise UsageError(f"--input {path}: cannot be read (no such file)")
        found = [file for file in inside if _belongs(file)] if is_folder else [path]
        if not found:
            suffixes = ", ".join(TEXT + JSON[:2])
            raise UsageError(
                f"--input {path}: has no files ending in {suffixes} (also with .gz) or "
                f"{PARQUET[0]}; give the files themselves, which may have any name"
            )
        files += found
        ignored += [file for file in inside if not _belongs(file)]
    if packed := [path for path in files if path.suffix.lower() == ".zst"]:
        raise UsageError(f"--input {packed[0]}: zstd is not supported; decompress it with zstd -d")
    return files, ignored


def _files_in(folder: Path) -> list[Path]:
    """Return the sorted paths of all files in a folder, except hidden ones."""
    return sorted(
        path
        for path in folder.rglob("*")
        if path.is_file() and not any(n.startswith(".") for n in path.relative_to(folder).parts)
    )


def _belongs(path: Path) -> bool:
    """Return whether a file in an input folder has a suitable suffix or the suffix .zst."""
    name = path.name.lower()
    # An uncompressed .json file is more likely to hold metadata than lines of documents.
    return name.removesuffix(".gz").endswith((*TEXT, *JSON[:2], *PARQUET, ".zst")) or (
        name.endswith(".json.gz")
    )


class _CountingFile(io.FileIO):
    """A file that reports how many bytes have been read from it."""

    def __init__(self, path: Path, advance: Advance):
        super().__init__(path)
        self._advance = advance

    def readinto(self, buffer):
        size = super().readinto(buffer)
        self._advance(size)
        return size


@contextlib.contextmanager
def open_file(path: Path, advance: Advance) -> Iterator[IO[bytes]]:
    """Open a file for reading bytes, and decompress it if its name ends in .gz.

    `advance` is called with the number of bytes read from the file, counted before decompression.
    If the file is not compressed, a `read()` without a size is not counted.

    Raises `UsageError` if the file cannot be opened, or if the `with` block raises `OSError`,
    `EOFError` or `zlib.error`.
    """
    try:
        with io.BufferedReader(_CountingFile(path, advance)) as file:
            if path.suffix.lower() == ".gz":
                with gzip.GzipFile(fileobj=file) as unpacked:
                    yield unpacked
            else:
                yield file
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"--input {path}: cannot be read ({in_words(error)})") from None


def read_text(path: Path, advance: Advance = lambda size: None) -> Iterator[str]:
    """Yield the text of a file in blocks of about 64 KiB or less. A block may be empty.

    `advance` is called with the number of bytes read from the file. Raises `UsageError` if the file
    is not UTF-8.
    """
    decoder, start, block = codecs.getincrementaldecoder("utf-8")(), 0, b"."
    with open_file(path, advance) as stream:
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


def read_lines(path: Path, advance: Advance) -> Iterator[tuple[int, bytes]]:
    """Yield (number, line) for each nonblank line of a file.

    Lines keep their newlines. Line numbers start at 1 and count blank lines. `advance` is called
    with the number of bytes read from the file.
    """
    with open_file(path, advance) as stream:
        for number, line in enumerate(stream, 1):
            if line.strip():
                yield number, line


def read_rows(
    path: Path, columns: Iterable[str], advance: Advance
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (number, row) for each row of a Parquet file.

    Row numbers start at 1. A row maps column names to values. Only `columns` are read, and columns
    that the file does not have are ignored. `advance` is called with the number of bytes read.

    Raises:
        UsageError: if pyarrow is not installed, if the file cannot be read or its name ends in .gz,
            or if all of the columns are missing.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UsageError(
            f"--input {path}: reading Parquet files needs pyarrow; run pip install "
            "'jaxgpt[parquet]' or pip install pyarrow"
        ) from None
    if path.suffix.lower() == ".gz":
        raise UsageError(f"--input {path}: Parquet cannot be read through gzip; run gunzip first")
    try:
        with (
            io.BufferedReader(_CountingFile(path, advance)) as raw,
            pyarrow.parquet.ParquetFile(raw) as file,
        ):
            names = file.schema_arrow.names
            wanted = [name for name in columns if name in names]
            if not wanted:
                raise UsageError(
                    f"--input {path}: has the columns {', '.join(names)}; choose the text column "
                    "with --jsonl-key NAME"
                )
            number = 0
            for batch in file.iter_batches(batch_size=1024, columns=wanted):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except (OSError, UnicodeDecodeError, pyarrow.ArrowException) as error:
        raise UsageError(f"--input {path}: cannot be read as Parquet ({in_words(error)})") from None


def count_characters(path: Path) -> int:
    """Return the number of characters in a text file."""
    return sum(map(len, read_text(path)))
