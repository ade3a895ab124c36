"""Parts of a dataset. A part holds the tokens of one or more input files.

Processes write different parts in parallel. A part's folder appears only when the part is complete.
If a command is killed, the next run of the same command reuses the completed parts of regular files
that have not changed.
"""

import contextlib
import hashlib
import json
import os
import shutil
import sys
import tempfile
import uuid
from array import array
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from jaxgpt.config import UsageError, in_words
from jaxgpt.data.nanogpt import mask_path
from jaxgpt.data.prepare.chat_template import template_files
from jaxgpt.data.prepare.files import Advance
from jaxgpt.data.prepare.text import InputFile, encode_files
from jaxgpt.data.prepare.writer import SCRATCH
from jaxgpt.data.source import PARTS
from jaxgpt.data.tokenizers import Tokenizer

_UNFINISHED = "unfinished-"
_FACTS = "part.json"  # the fields of `Part` after `folder`
_VERSION = 1  # format version of the parts
_PART = 1 << 26  # files are combined into one part up to this total size, in bytes


class Part(NamedTuple):
    """A folder with SPLIT.bin, masks and lengths.bin.

    lengths.bin holds the number of tokens in each document, including the end-of-text token: int64,
    shape (documents,).
    """

    folder: Path
    documents: int  # number of documents that have text
    tokens: dict[str, int]  # number of tokens in each split that has text
    # False for a split whose last document in this part continues in the next split.
    ends: dict[str, bool]
    has_mask: bool | None  # None if the part has no text


@contextlib.contextmanager
def parts_folder(directory: Path) -> Iterator[Path]:
    """Yield a folder for the parts of a dataset, and delete it when the block ends.

    If the block raises an exception, completed parts are kept. If no part is complete, the folder
    is deleted. `directory` is also deleted if it is new and empty. Temporary files of commands that
    were killed are deleted, so no other command may be writing to `directory`. Raises `OSError` if
    `directory` cannot be written.
    """
    is_new = not directory.exists()
    folder = directory / PARTS
    folder.mkdir(parents=True, exist_ok=True)
    _delete(folder, _UNFINISHED)  # left by a command that was killed
    _delete(directory, SCRATCH)
    try:
        yield folder
    except BaseException:
        _delete(folder, _UNFINISHED)
        for path in (folder, directory) if is_new else (folder,):
            if path.exists() and not any(path.iterdir()):
                path.rmdir()
        raise
    shutil.rmtree(folder)


def _delete(folder: Path, prefix: str) -> None:
    for path in folder.glob(f"{prefix}*"):
        shutil.rmtree(path, ignore_errors=True)


def write_parts(
    files: Sequence[InputFile],
    tokenizer: Tokenizer,
    dtype: np.dtype,
    folder: Path,
    pool: Executor | None,
) -> list[Part]:
    """Tokenize the files that have no part yet, and return all parts in file order.

    This process and the pool write parts in parallel. A progress bar on standard error appears
    after a delay.

    Args:
        files: at least one file.
        dtype: integer type of the token IDs in the parts, large enough for every ID.
        folder: the folder that `parts_folder` yields.
        pool: the other processes, or None if there are none.

    Raises:
        UsageError: if only some documents have answers.
    """
    groups = list(_groups(files))
    sizes = [sum(_size(file) for file in group) for group in groups]
    common = _common_facts(files[0], tokenizer, dtype)
    tasks = [(group, tokenizer, dtype, folder / _key(group, common)) for group in groups]
    parts: list[Part | None] = [None] * len(groups)
    first: dict[bool, int] = {}  # has_mask -> index of the first part with this value

    def add(number: int, part: Part) -> None:
        parts[number] = part
        if part.has_mask is not None:
            first.setdefault(part.has_mask, number)
        if len(first) == 2:
            raise _different_kinds(*(str(groups[number][0].path) for number in first.values()))

    for number, (*_, path) in enumerate(tasks):
        if path.exists():
            add(number, _read(path))
    missing = [number for number, part in enumerate(parts) if part is None]
    n_done = sum(sizes) - sum(sizes[number] for number in missing)
    every = 0.5 if sys.stderr.isatty() else 10  # seconds
    options = {"unit_scale": True, "delay": every, "mininterval": every, "leave": False}
    with tqdm(total=sum(sizes) or None, initial=n_done, unit="B", **options) as bar:
        if pool is None:
            for number in missing:
                add(number, _write_part(*tasks[number], bar.update))
            return parts
        futures = {pool.submit(_write_part, *tasks[number]): number for number in missing}

        def collect(done: Iterable[Future]) -> None:
            for future in done:
                number = futures.pop(future)
                add(number, future.result())
                bar.update(sizes[number])

        for future, number in list(futures.items()):
            if future.cancel():  # no other process has started this part
                del futures[future]
                add(number, _write_part(*tasks[number], bar.update))
                collect([future for future in futures if future.done()])
        collect(as_completed(list(futures)))
    return parts


def _groups(files: Sequence[InputFile]) -> Iterator[list[InputFile]]:
    """Yield groups of consecutive files. Each group becomes one part."""
    group: list[InputFile] = []
    total = 0
    for file in files:
        size = _size(file)
        if group and total + size > _PART:
            yield group
            group, total = [], 0
        group.append(file)
        total += size
    yield group


def _size(file: InputFile) -> int:
    try:
        return file.path.stat().st_size
    except OSError as error:
        raise UsageError(f"--input {file.path}: cannot be read ({in_words(error)})") from None


def _write_part(
    files: Sequence[InputFile],
    tokenizer: Tokenizer,
    dtype: np.dtype,
    folder: Path,
    advance: Advance = lambda size: None,
) -> Part:
    """Tokenize files into `folder`, which is created atomically.

    `advance` is called with the number of bytes read. Raises `UsageError` if only some documents
    have answers. Raises `OSError` if the part cannot be written.
    """
    scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=_UNFINISHED))
    tokens: dict[str, int] = {}
    ends: dict[str, bool] = {}
    has_mask, lengths, unfinished = None, array("q"), 0
    with contextlib.ExitStack() as stack:
        opened: dict[Path, Any] = {}

        def write(path: Path, values: np.ndarray) -> None:
            if path not in opened:
                opened[path] = stack.enter_context(open(path, "wb"))
            opened[path].write(values.data)

        for chunk, ids, weights in encode_files(files, tokenizer, advance):
            if has_mask not in (None, weights is not None):
                raise _different_kinds(f"the document {chunk.text[:60]!r}...", "the one before it")
            has_mask = weights is not None
            path = scratch / f"{chunk.split}.bin"
            write(path, ids.astype(dtype))
            if has_mask:
                write(mask_path(path), weights)
            tokens[chunk.split] = tokens.get(chunk.split, 0) + ids.size
            ends[chunk.split] = chunk.ends
            unfinished += ids.size
            if chunk.ends:
                lengths.append(unfinished)
                unfinished = 0
    np.array(lengths, "<i8").tofile(scratch / "lengths.bin")
    part = Part(folder, len(lengths), tokens, ends, has_mask)
    (scratch / _FACTS).write_text(json.dumps(part[1:]))
    for path in scratch.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())  # without this, a power failure could leave an incomplete part
    try:
        os.rename(scratch, folder)
    except OSError:
        if not folder.exists():
            raise
        shutil.rmtree(scratch)  # the files were given twice, so the existing part is identical
    return part


def _different_kinds(one: str, other: str) -> UsageError:
    return UsageError(
        f"--input: {one} and {other} differ, because only one of them has prompts or messages; "
        "prepare them separately and mix them with data.blend"
    )


def _read(folder: Path) -> Part:
    return Part(folder, *json.loads((folder / _FACTS).read_text()))


def _common_facts(file: InputFile, tokenizer: Tokenizer, dtype: np.dtype) -> list[Any]:
    """Return the settings that affect all parts. `file` is any file of the corpus.

    Raises `UsageError` if a file named by `template_files` cannot be read.
    """
    templates = template_files(file.lines.tokenizer, file.lines.chat_template)
    hashes = []
    for path in templates:
        if path and path.is_file():
            try:
                hashes.append(hashlib.sha256(path.read_bytes()).hexdigest())
            except OSError as error:
                raise UsageError(f"{path}: cannot be read ({in_words(error)})") from None
    return [_VERSION, file.val_share, file.lines.key, tokenizer.to_meta(), dtype.name, hashes]


def _key(group: Sequence[InputFile], common: list[Any]) -> str:
    """Return a hash of a part's settings and of its files' paths, sizes and modification times."""
    facts = [common]
    for file in group:
        found = file.path.stat()
        is_pipe = not file.path.is_file()
        facts.append([
            str(file.path.absolute()), found.st_size, found.st_mtime_ns, file.n_train,
            uuid.uuid4().hex if is_pipe else None,  # a pipe cannot be read again
        ])  # fmt: skip
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def join(parts: Sequence[Part], splits: Sequence[str], suffix: str, out: Path) -> None:
    """Concatenate the files SPLIT + `suffix` of all parts, in order, into the file `out`.

    Within a part, files are in the order of `splits`, and missing files are skipped. Raises
    `OSError` if a file cannot be read or written.
    """
    with open(out, "wb") as target:
        for part in parts:
            for split in splits:
                path = part.folder / f"{split}{suffix}"
                if path.exists():  # the part has text in this split
                    with open(path, "rb") as source:
                        shutil.copyfileobj(source, target, 1 << 24)
