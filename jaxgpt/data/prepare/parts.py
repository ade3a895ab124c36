"""The parts of a dataset: the tokens of one large input file, or of several small ones.

Processes write different parts at the same time, and a part appears on disk only when it is
complete. If a command is killed, its complete parts stay, and the same command uses them again.
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
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from jaxgpt.config import UsageError
from jaxgpt.data.nanogpt import mask_path
from jaxgpt.data.prepare.chat_template import template_files
from jaxgpt.data.prepare.files import Advance
from jaxgpt.data.prepare.text import InputFile, encode_files
from jaxgpt.data.source import PARTS
from jaxgpt.data.tokenizers import Tokenizer

_UNFINISHED = "unfinished-"
_VERSION = 1  # of the content of parts
_PART = 1 << 26  # approximate number of bytes of small files to put into one part


class Part(NamedTuple):
    """A folder with SPLIT.bin, masks and lengths.bin, the documents' lengths as int32."""

    folder: Path
    documents: int
    tokens: dict[str, int]  # number of tokens in each split
    ends: dict[str, bool]  # whether a split's last document ends in this part
    has_mask: bool | None  # None without tokens


@contextlib.contextmanager
def parts_folder(directory: Path) -> Iterator[Path]:
    """Yield a folder for the parts of a dataset, and delete it when the block ends.

    If an exception leaves the block, complete parts are kept. If there are none, `directory` is
    deleted if it is new.
    """
    is_new = not directory.exists()
    folder = directory / PARTS
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield folder
    except BaseException:
        for path in folder.glob(f"{_UNFINISHED}*"):
            shutil.rmtree(path, ignore_errors=True)
        for path in (folder, directory) if is_new else (folder,):
            with contextlib.suppress(OSError):  # not empty, or deleted
                path.rmdir()
        if folder.exists():
            print(f"{folder} keeps the files that are done; run again to continue", file=sys.stderr)
        raise
    shutil.rmtree(folder)


def write_parts(
    files: Sequence[InputFile],
    tokenizer: Tokenizer,
    dtype: np.dtype,
    folder: Path,
    pool: Executor | None,
) -> list[Part]:
    """Tokenize the files that have no part yet, and return all parts in the order of the files.

    A progress bar on standard error shows the rate and the time left. Without a pool of processes,
    parts are written one after another.

    Raises:
        UsageError: if a file cannot be read or encoded, or only some files have answers.
    """
    groups = list(_groups(files))
    sizes = [sum(_size(file) for file in group) for group in groups]
    common = _common_facts(files[0], tokenizer, dtype)
    folders = [folder / _key(group, common) for group in groups]
    parts = [_read(path) if path.exists() else None for path in folders]
    every = 0.5 if sys.stderr.isatty() else 10  # seconds
    done = sum(size for size, part in zip(sizes, parts, strict=True) if part is not None)
    options = {"unit_scale": True, "delay": every, "mininterval": every, "leave": False}
    try:
        with tqdm(total=sum(sizes) or None, initial=done, unit="B", **options) as bar:
            missing = [number for number, part in enumerate(parts) if part is None]
            if pool is None:
                for number in missing:
                    given = groups[number], tokenizer, dtype, folders[number], bar.update
                    parts[number] = _write_part(*given)
                    _check_masks(groups, parts)
            else:
                futures = {}
                for number in missing:
                    given = groups[number], tokenizer, dtype, folders[number]
                    futures[pool.submit(_write_part, *given)] = number
                for future in as_completed(futures):
                    number = futures[future]
                    parts[number] = future.result()
                    bar.update(sizes[number])
                    _check_masks(groups, parts)
    except BaseException:
        if pool is not None:
            pool.shutdown(cancel_futures=True)
        raise
    _check_masks(groups, parts)  # all parts may be from an earlier command
    return parts


def _groups(files: Sequence[InputFile]) -> Iterator[list[InputFile]]:
    """Yield consecutive files that share a part: one large file, or several small ones."""
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
    return file.path.stat().st_size


def _write_part(
    files: Sequence[InputFile],
    tokenizer: Tokenizer,
    dtype: np.dtype,
    folder: Path,
    advance: Advance = lambda size: None,
) -> Part:
    """Tokenize files into `folder`, which appears when it is complete."""
    scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=_UNFINISHED))
    tokens: dict[str, int] = {}
    ends: dict[str, bool] = {}
    has_mask, lengths, unfinished = None, array("i"), 0
    with contextlib.ExitStack() as stack:
        opened: dict[Path, Any] = {}

        def write(path: Path, array: np.ndarray) -> None:
            if path not in opened:
                opened[path] = stack.enter_context(open(path, "wb"))
            opened[path].write(array.data)

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
        np.array(lengths, "<i4").tofile(scratch / "lengths.bin")
    part = Part(folder, len(lengths), tokens, ends, has_mask)
    (scratch / "part.json").write_text(json.dumps(part._replace(folder=None)))
    try:
        os.rename(scratch, folder)
    except OSError:
        if not folder.exists():
            raise
        shutil.rmtree(scratch)  # the files were given twice, and the other part is the same
    return part


def _check_masks(groups: Sequence[Sequence[InputFile]], parts: Sequence[Part | None]) -> None:
    """Raise `UsageError` if some complete parts have a loss mask and others have none."""
    known = [i for i, part in enumerate(parts) if part is not None and part.has_mask is not None]
    for i in known:
        if parts[i].has_mask != parts[known[0]].has_mask:
            raise _different_kinds(str(groups[known[0]][0].path), str(groups[i][0].path))


def _different_kinds(one: str, other: str) -> UsageError:
    return UsageError(
        f"--input: {one} and {other} differ, because only one of them has prompts or messages; "
        "prepare them separately and mix them with data.blend"
    )


def _read(folder: Path) -> Part:
    return Part(folder, *json.loads((folder / "part.json").read_text())[1:])


def _common_facts(file: InputFile, tokenizer: Tokenizer, dtype: np.dtype) -> list[Any]:
    """Return the settings that affect all parts; `file` is any file of the corpus."""
    templates = template_files(file.lines.tokenizer, file.lines.chat_template)
    hashes = [hashlib.sha256(t.read_bytes()).hexdigest() for t in templates if t.is_file()]
    return [_VERSION, file.val_share, file.lines.key, tokenizer.to_meta(), dtype.name, hashes]


def _key(group: Sequence[InputFile], common: list[Any]) -> str:
    """Return a name that identifies the content of files and all settings that affect the part."""
    facts = [common]
    for file in group:
        found = file.path.stat()
        is_pipe = not file.path.is_file()
        facts.append([
            str(file.path.absolute()), found.st_size, found.st_mtime_ns, file.n_train,
            uuid.uuid4().hex if is_pipe else None,  # the text of a pipe cannot be read again
        ])  # fmt: skip
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def join(parts: Sequence[Part], splits: Sequence[str], suffix: str, out: Path) -> None:
    """Concatenate the files SPLIT + `suffix` of all parts, in order."""
    with open(out, "wb") as target:
        for part in parts:
            for split in splits:
                path = part.folder / f"{split}{suffix}"
                if path.exists():  # the part has tokens in this split
                    with open(path, "rb") as source:
                        shutil.copyfileobj(source, target, 1 << 24)
