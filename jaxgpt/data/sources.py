"""Token files on disk: nanoGPT's train.bin and val.bin beside a meta.json.

A `.bin` is a flat array of token ids, uint16 or uint32, little-endian, without a header. It is
memory-mapped: what a run reads of it is only the rows that it trains on.
"""

import functools
import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxgpt.config import DataConfig, ModelConfig, UsageError
from jaxgpt.data.tokenizer import Tokenizer, from_meta

SPLITS = ("train", "val")
VOCABULARY_SIZES = {"python": 256, "shakespeare_char": 65}  # what corpora.py makes by name alone
_PAGE = 16384  # bytes
_SAMPLED_PAGES = 4096  # at most this many of a file are hashed and scanned: all of 64 MiB


@dataclass(frozen=True)
class Dataset:
    """An opened data set."""

    directory: Path
    vocab_size: int
    tokens: dict[str, np.ndarray]
    """Memory map of token ids for each split, shape (tokens,)."""
    tokenizer: Tokenizer | None
    """None where the files came without a meta.json."""
    meta: dict[str, Any]
    """What meta.json holds; empty without one."""

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 over sizes, dtype, vocabulary and sampled pages; kept in every checkpoint."""
        return fingerprint_of(self.tokens, self.meta.get("vocab_size", self.vocab_size))

    def verify(self) -> None:
        """Reads up to 64 MiB of each file for what `open_dataset` cannot see.

        Raises:
            UsageError: if a token is outside the vocabulary, or the files are not those that
                their meta.json was written for.
        """
        for split in SPLITS:
            for page, start in _sampled_pages(self.tokens[split]):
                check_tokens(page, self.vocab_size, self.directory / f"{split}.bin", start)
        if self.meta.get("fingerprint", self.fingerprint) != self.fingerprint:
            raise UsageError(
                f"{self.directory}: the token files are not those that meta.json was written "
                "for; prepare the data again"
            )


def dataset_directory(data: DataConfig) -> Path:
    """Where the data set of a configuration is, or will be once it is prepared."""
    if data.path is not None:
        return Path(data.path)
    home = os.environ.get("JAXGPT_DATA") or Path.home() / ".cache" / "jaxgpt"
    return Path(home) / data.dataset


def vocabulary_size(data: DataConfig, model: ModelConfig) -> int:
    """V of a configuration, whether or not its data has been prepared on this machine.

    Raises:
        UsageError: if nothing says.
    """
    found = model.vocab_size or _read_meta(dataset_directory(data)).get("vocab_size")
    if found is None and data.path is None:
        found = VOCABULARY_SIZES.get(data.dataset)
    if found is None:
        raise UsageError(
            f"{_named(data)}: is not here to say how large its vocabulary is; give a number, such "
            "as model.vocab_size=50257, or prepare the data with python -m jaxgpt.prepare"
        )
    return found


def open_dataset(data: DataConfig, model: ModelConfig) -> Dataset:
    """Opens the files that a configuration names, without reading tokens.

    Raises:
        UsageError: if files are missing, empty or too short for one row, or the vocabulary is
            not known or larger than model.vocab_size.
    """
    directory = dataset_directory(data)
    key = _named(data)
    for split in SPLITS:
        if not (directory / f"{split}.bin").is_file():
            remedy = f"run `python -m jaxgpt.prepare {data.dataset}`"
            if data.path is not None:
                remedy = "give a folder with train.bin, val.bin and meta.json"
            elif data.dataset not in VOCABULARY_SIZES:
                remedy = (
                    f"run `python -m jaxgpt.prepare text --name {data.dataset} --input FILE ...`, "
                    "or give data.path=DIR"
                )
            raise UsageError(f"{key}: there is no {directory / f'{split}.bin'}; {remedy}")
    meta = _read_meta(directory)
    vocab_size = model.vocab_size or meta.get("vocab_size")
    if vocab_size is None:
        raise UsageError(
            f"{key}: {directory} has no meta.json that says vocab_size; "
            "give model.vocab_size=N, or write the data with python -m jaxgpt.prepare"
        )
    if meta.get("vocab_size", 0) > vocab_size:
        raise UsageError(
            f"model.vocab_size={vocab_size}: {directory} has a vocabulary of "
            f"{meta['vocab_size']}; use None or at least {meta['vocab_size']}"
        )
    dtype = np.dtype(meta.get("dtype", "uint16")).newbyteorder("<")
    tokens = {}
    for split in SPLITS:
        path = directory / f"{split}.bin"
        size = path.stat().st_size
        if size % dtype.itemsize or size // dtype.itemsize < model.block_size + 1:
            raise UsageError(
                f"{key}: {path} has {size} bytes; a {dtype.name} token file for "
                f"model.block_size={model.block_size} needs whole tokens and at least "
                f"{(model.block_size + 1) * dtype.itemsize} bytes"
            )
        tokens[split] = np.memmap(path, dtype, mode="r")
    tokenizer = from_meta(meta["tokenizer"]) if meta else None
    return Dataset(directory, vocab_size, tokens, tokenizer, meta)


def check_tokens(tokens: np.ndarray, vocab_size: int, path: Path, start: int) -> None:
    """Refuses token ids outside the vocabulary.

    Args:
        tokens: ids read from `path`, the first of them at token number `start`.

    Raises:
        UsageError: naming the file, the offset and the token.
    """
    if tokens.size and tokens.max() >= vocab_size:
        at = int(np.argmax(tokens >= vocab_size))
        token = int(tokens[at])
        raise UsageError(
            f"model.vocab_size={vocab_size}: {path} holds token {token} at offset {start + at}; "
            f"prepare the data again, or set model.vocab_size to at least {token + 1}"
        )


def fingerprint_of(tokens: dict[str, np.ndarray], vocab_size: int) -> str:
    """A hash that changes when the data does: sizes, dtype, vocabulary, sampled pages.

    Args:
        tokens: split -> token ids; read in place, at most a few MB of each.
    """
    digest = hashlib.sha256(f"{vocab_size}".encode())
    for split in SPLITS:
        digest.update(f"{split} {tokens[split].size} {tokens[split].dtype.name}".encode())
        for page, _ in _sampled_pages(tokens[split]):
            digest.update(page.tobytes())
    return "sha256:" + digest.hexdigest()


def write_dataset(
    directory: Path, tokens: dict[str, np.ndarray], tokenizer: Tokenizer, source: str
) -> None:
    """Writes train.bin, val.bin and meta.json; a new folder appears with all of them.

    Args:
        tokens: split -> token ids, of any integer dtype.
        source: where the text came from, for people.
    """
    dtype = "uint16" if tokenizer.vocab_size <= 2**16 else "uint32"
    tokens = {split: tokens[split].astype(np.dtype(dtype).newbyteorder("<")) for split in SPLITS}
    meta = {
        "format": "jaxgpt tokens 1",
        "source": source,
        "tokenizer": tokenizer.to_meta(),
        "vocab_size": tokenizer.vocab_size,
        "dtype": dtype,
        "tokens": {split: int(tokens[split].size) for split in SPLITS},
        "fingerprint": fingerprint_of(tokens, tokenizer.vocab_size),
    }
    directory.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=directory.parent, prefix=f".{directory.name}-"))
    try:
        for split in SPLITS:
            tokens[split].tofile(scratch / f"{split}.bin")
        (scratch / "meta.json").write_text(json.dumps(meta, indent=1, ensure_ascii=False) + "\n")
        scratch.chmod(0o755)
        if directory.is_dir():  # its files are replaced, the description of them last
            for name in ("train.bin", "val.bin", "meta.json"):
                os.replace(scratch / name, directory / name)
        else:
            scratch.rename(directory)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _named(data: DataConfig) -> str:
    """The key by which a configuration names its data, as a user gives it."""
    return f"data.path={data.path}" if data.path is not None else f"data.dataset={data.dataset}"


def _read_meta(directory: Path) -> dict[str, Any]:
    path = directory / "meta.json"
    if not path.is_file():
        return {}
    try:
        meta = json.loads(path.read_text())
        if meta["dtype"] not in ("uint16", "uint32") or not isinstance(meta["vocab_size"], int):
            raise ValueError(f"dtype {meta['dtype']}, vocab_size {meta['vocab_size']}")
        from_meta(meta["tokenizer"])
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(
            f"{path}: is not what python -m jaxgpt.prepare writes ({error!r}); "
            "prepare the data again"
        ) from None
    return meta


def _sampled_pages(tokens: np.ndarray):
    """(ids, offset of the first) of evenly spaced pages, the first and last among them."""
    per_page = _PAGE // tokens.itemsize
    pages = -(-tokens.size // per_page)
    for page in np.unique(np.linspace(0, pages - 1, min(pages, _SAMPLED_PAGES)).astype(np.int64)):
        start = int(page) * per_page
        yield np.asarray(tokens[start : start + per_page]), start
