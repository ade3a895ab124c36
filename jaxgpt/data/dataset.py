"""What a run trains on: one data set, or a blend of many.

A source is a folder with nanoGPT's train.bin and val.bin (flat arrays of token ids, uint16 or
uint32, little-endian) beside a meta.json; a lone .bin of that kind; or an indexed data set of
Megatron-LM. The last two have no validation file: their last documents are kept for it.
"""

import functools
import json
import os
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from jaxgpt.config import DataConfig, ModelConfig, UsageError
from jaxgpt.data.blend import BlendEntry, parse_lines, read_file_list
from jaxgpt.data.megatron import Index, index_prefix, read_index
from jaxgpt.data.token_file import SAMPLED_PAGES, TokenFile, allow_open_files, fingerprint_of
from jaxgpt.data.tokenizers.char import Tokenizer
from jaxgpt.data.tokenizers.registry import load_tokenizer, tokenizer_from_meta

SPLITS = ("train", "val")
VOCABULARY_SIZES = {"python": 256, "shakespeare_char": 65}  # what corpora.py makes by name alone


@dataclass(frozen=True)
class Source:
    """An opened source."""

    entry: BlendEntry
    tokens: dict[str, TokenFile]
    """By split."""
    indexed: Path | None
    """Prefix of Megatron's .bin and .idx, if it is such a pair."""
    meta: dict[str, Any]
    """What meta.json holds; empty without one."""

    @functools.cached_property
    def index(self) -> Index | None:
        """Where documents begin, if that is known; a run has no need to keep it open."""
        return read_index(self.indexed) if self.indexed else None

    @property
    def directory(self) -> Path:
        return self.entry.directory

    @property
    def kind(self) -> str:
        """Format and type of its tokens, for people."""
        return f"{'Megatron' if self.indexed else 'flat'} {self.tokens['train'].dtype.name}"


@dataclass(frozen=True)
class Dataset:
    """An opened data set."""

    sources: tuple[Source, ...]
    vocab_size: int
    given_tokenizer: Tokenizer | None
    """That of data.tokenizer."""

    @functools.cached_property
    def tokenizer(self) -> Tokenizer | None:
        """None where nothing says how the tokens were made."""
        if self.given_tokenizer is not None:
            return self.given_tokenizer
        for source in self.sources:
            if source.meta:
                return tokenizer_from_meta(source.meta["tokenizer"], source.directory)
        return None

    @property
    def tokenizer_meta(self) -> dict[str, Any] | None:
        """The tokenizer's description, without loading it."""
        if self.given_tokenizer is not None:
            return self.given_tokenizer.to_meta()
        return next((source.meta["tokenizer"] for source in self.sources if source.meta), None)

    @functools.cached_property
    def corpora(self) -> tuple[str, ...]:
        """The names of the corpora, in the order in which they are first named."""
        return tuple(dict.fromkeys(source.entry.corpus for source in self.sources))

    def size(self, split: str) -> int:
        """Tokens of a split, over all sources."""
        return sum(source.tokens[split].size for source in self.sources)

    @functools.cached_property
    def fingerprints(self) -> list[list[str]]:
        """[path, hash of its sizes, dtype, vocabulary and sampled pages] of every source."""
        return [
            [
                str(source.entry.path),
                fingerprint_of(
                    source.tokens,
                    source.meta.get("vocab_size", self.vocab_size),
                    self._pages_of_each,
                ),
            ]
            for source in self.sources
        ]

    @property
    def _pages_of_each(self) -> int:
        return max(16, SAMPLED_PAGES // len(self.sources))

    def describe(self) -> list[str]:
        """Lines for the log: how many tokens there are, and of what."""
        sizes = f"{self.size('train'):,} tokens to train on, {self.size('val'):,} to validate"
        kinds = ", ".join(sorted({source.kind for source in self.sources}))
        if len(self.sources) == 1:
            place = self.sources[0].entry.path
            return [f"data: {place} ({kinds}), {sizes}, vocabulary {self.vocab_size}"]
        lines = [
            f"data: {len(self.sources)} sources ({kinds}) of {len(self.corpora)} corpora, {sizes}, "
            f"vocabulary {self.vocab_size}"
        ]
        whole = sum(source.entry.weight for source in self.sources)
        for corpus in self.corpora:
            members = [s for s in self.sources if s.entry.corpus == corpus]
            share = float(sum(s.entry.weight for s in members) / whole)
            tokens = sum(s.tokens["train"].size for s in members)
            lines.append(
                f"corpus {corpus}: {share:.4%} of all samples, {tokens:,} tokens in "
                f"{len(members)} {'source' if len(members) == 1 else 'sources'}"
            )
        return lines

    def verify(self) -> None:
        """Reads up to 64 MiB of the files for what `open_dataset` cannot see.

        Raises:
            UsageError: if a token is outside the vocabulary, or the files are not those that
                their meta.json was written for.
        """
        for source, (path, found) in zip(self.sources, self.fingerprints, strict=True):
            for tokens in source.tokens.values():
                for start, page in tokens.sampled_pages(self._pages_of_each):
                    tokens.check(page, start, self.vocab_size)
            written = source.meta.get("fingerprint", found)
            if written != found and self._pages_of_each == SAMPLED_PAGES:  # as when it was written
                raise UsageError(
                    f"{path}: the token files are not those that meta.json was written for; "
                    "prepare the data again"
                )


def dataset_directory(data: DataConfig) -> Path:
    """Where the data set of a configuration is, or will be once it is prepared."""
    if data.path is not None:
        return Path(data.path)
    home = os.environ.get("JAXGPT_DATA") or Path.home() / ".cache" / "jaxgpt"
    return Path(home) / data.dataset


def entries(data: DataConfig) -> list[BlendEntry]:
    """The sources that a configuration names.

    Raises:
        UsageError: for a line of a blend that is not one.
    """
    if data.file_list is not None:
        key, lines = f"data.file_list={data.file_list}", read_file_list(Path(data.file_list))
    elif data.blend:
        key, lines = "data.blend", list(data.blend)
    else:
        key = f"data.dataset={data.dataset}" if data.path is None else f"data.path={data.path}"
        directory = dataset_directory(data)
        return [BlendEntry(Fraction(1), "1", directory, directory.name, key)]
    return parse_lines(lines, key)


def vocabulary_size(data: DataConfig, model: ModelConfig) -> int:
    """V of a configuration, whether or not its data has been prepared on this machine.

    Raises:
        UsageError: if nothing says.
    """
    named = entries(data)
    sizes = [_meta_of(entry).get("vocab_size", 0) for entry in named]
    found = model.vocab_size or max(sizes)
    if not found and (tokenizer := _open_tokenizer(data)):
        found = tokenizer.vocab_size
    if not found and data.path is None and len(named) == 1:
        found = VOCABULARY_SIZES.get(data.dataset)
    if not found:
        raise UsageError(
            f"{named[0].key}: is not here to say how large its vocabulary is; give a number, such "
            "as model.vocab_size=50257, or prepare the data with python -m jaxgpt.prepare"
        )
    return found


def open_dataset(data: DataConfig, model: ModelConfig) -> Dataset:
    """Opens the files that a configuration names, without reading tokens.

    Raises:
        UsageError: if files are missing, damaged or too short for one row, the vocabulary is
            not known or larger than model.vocab_size, or sources have different tokenizers.
    """
    sources = tuple(_open_source(entry, data, model.block_size + 1) for entry in entries(data))
    allow_open_files(len({file.path for source in sources for file in source.tokens.values()}))
    tokenizer = _open_tokenizer(data)
    made_by = [
        (str(s.entry.path), s.meta["tokenizer"], s.meta["vocab_size"]) for s in sources if s.meta
    ]
    if tokenizer is not None:
        made_by.insert(
            0, (f"data.tokenizer={data.tokenizer}", tokenizer.to_meta(), tokenizer.vocab_size)
        )
    for name, described, _ in made_by:
        if described != made_by[0][1]:
            raise UsageError(
                f"{sources[0].entry.key}: {name} has another tokenizer than {made_by[0][0]}; "
                "prepare both with the same one"
            )
    known = made_by[0][2] if made_by else 0
    vocab_size = model.vocab_size or known
    if not vocab_size:
        raise UsageError(
            f"{sources[0].entry.key}: {sources[0].entry.path} has no meta.json that says "
            "vocab_size; give model.vocab_size=N, data.tokenizer=FILE, or write the data with "
            "python -m jaxgpt.prepare"
        )
    if known > vocab_size:
        raise UsageError(
            f"model.vocab_size={vocab_size}: {made_by[0][0]} has a vocabulary of {known}; "
            f"use None or at least {known}"
        )
    return Dataset(sources, vocab_size, tokenizer)


def _open_tokenizer(data: DataConfig) -> Tokenizer | None:
    if data.tokenizer is None:
        return None
    return load_tokenizer(Path(data.tokenizer))


def _open_source(entry: BlendEntry, data: DataConfig, least: int) -> Source:
    """Opens one source, of whose splits each must have at least `least` tokens."""
    path, meta = entry.path, _meta_of(entry)
    prefix = index_prefix(path)
    indexed = None
    if path.is_dir() or entry.key.startswith("data.dataset"):
        tokens = {split: _flat(path / f"{split}.bin", meta, entry, data, least) for split in SPLITS}
    elif _is_indexed(path):
        indexed = prefix
        index = read_index(prefix)
        file = TokenFile(index.bin_path, index.dtype, index.total_tokens)
        last = min(round(file.size * (1 - data.val_share)), file.size - 1)
        tokens = _split(file, index.document_start(index.document_of(last)), entry, data, least)
    else:
        file = _flat(prefix.with_name(prefix.name + ".bin"), meta, entry, data, least)
        if path == prefix:
            raise UsageError(
                f"{entry.key}: there is no {prefix}.idx beside {prefix}.bin; bring it back, or "
                f"give {prefix}.bin to have it read as a flat file of {file.dtype.name}"
            )
        tokens = _split(file, round(file.size * (1 - data.val_share)), entry, data, least)
        meta.pop("fingerprint", None)  # it is of the whole folder
    return Source(entry, tokens, indexed, meta)


def _meta_of(entry: BlendEntry) -> dict[str, Any]:
    """What a source's meta.json holds: in its folder, or beside a lone .bin."""
    try:
        if _is_indexed(entry.path):
            return {}
        return _read_meta(entry.directory)
    except OSError as error:
        raise UsageError(
            f"{entry.key}: {error.filename} cannot be read ({error.strerror}); ask its owner to "
            "let you, or give another path"
        ) from None


def _is_indexed(path: Path) -> bool:
    """Whether it is PREFIX, PREFIX.bin or PREFIX.idx of Megatron's .bin and .idx."""
    prefix = index_prefix(path)
    return not path.is_dir() and prefix.with_name(prefix.name + ".idx").is_file()


def _split(
    file: TokenFile, boundary: int, entry: BlendEntry, data: DataConfig, least: int
) -> dict[str, TokenFile]:
    splits = {"train": file.part(0, boundary), "val": file.part(boundary, file.size)}
    for split, tokens in splits.items():
        if tokens.size < least:
            raise UsageError(
                f"{entry.key}: {file.path} has {tokens.size} tokens for split {split} with "
                f"data.val_share={data.val_share}; model.block_size={least - 1} needs at least "
                f"{least}: give another data.val_share, a file of more documents, or leave it out"
            )
    return splits


def _flat(
    path: Path, meta: dict[str, Any], entry: BlendEntry, data: DataConfig, least: int
) -> TokenFile:
    if not path.is_file():
        raise UsageError(f"{entry.key}: there is no {path}; {_remedy(entry, data)}")
    dtype = np.dtype(meta.get("dtype", "uint16"))
    size = path.stat().st_size
    if size % dtype.itemsize or size // dtype.itemsize < least:
        raise UsageError(
            f"{entry.key}: {path} has {size} bytes; a {dtype.name} token file for "
            f"model.block_size={least - 1} needs whole tokens and at least "
            f"{least * dtype.itemsize} bytes"
        )
    expected = meta.get("tokens", {}).get(path.stem, size // dtype.itemsize) * dtype.itemsize
    if size != expected:
        raise UsageError(
            f"{entry.key}: {path} ends at byte {size}, not at {expected} as its meta.json says; "
            "copy it or prepare the data again"
        )
    return TokenFile(path, dtype, size // dtype.itemsize)


def _remedy(entry: BlendEntry, data: DataConfig) -> str:
    if not entry.key.startswith("data.dataset"):
        return (
            "give a folder with train.bin, val.bin and meta.json, a .bin of nanoGPT's, or the "
            "prefix of Megatron's .bin and .idx"
        )
    if data.dataset in VOCABULARY_SIZES:
        return f"run `python -m jaxgpt.prepare {data.dataset}`"
    return (
        f"run `python -m jaxgpt.prepare text --name {data.dataset} --input FILE ...`, "
        "or give data.path=DIR"
    )


def _read_meta(directory: Path) -> dict[str, Any]:
    path = directory / "meta.json"
    if not path.is_file():
        return {}
    try:
        meta = json.loads(path.read_text())
        if meta["dtype"] not in ("uint16", "uint32") or not isinstance(meta["vocab_size"], int):
            raise ValueError(f"dtype {meta['dtype']}, vocab_size {meta['vocab_size']}")
        meta["tokenizer"]["type"]
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(
            f"{path}: is not what python -m jaxgpt.prepare writes ({error!r}); "
            "prepare the data again"
        ) from None
    return meta
