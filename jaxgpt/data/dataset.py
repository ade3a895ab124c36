"""The data of a run: one source of tokens, or a blend of many."""

import functools
import os
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from jaxgpt.config import DataConfig, ModelConfig, UsageError
from jaxgpt.data import FORMATS
from jaxgpt.data.blend import BlendEntry, parse_lines, read_file_list
from jaxgpt.data.source import SPLITS, Document, DocumentIndex, MarkedDocuments, OpenSource
from jaxgpt.data.token_file import SAMPLED_PAGES, Tokens, allow_open_files, fingerprint
from jaxgpt.data.tokenizers import Tokenizer, load_tokenizer, tokenizer_from_meta

VOCABULARY_SIZES = {"python": 256, "shakespeare_char": 65}  # what corpora.py makes by name alone


@dataclass(frozen=True)
class Source:
    """An opened source of a configuration."""

    entry: BlendEntry
    format: str
    """Its name in `FORMATS`."""
    tokens: dict[str, Tokens]
    """By split."""
    documents: DocumentIndex | None
    """None where only end-of-text tokens separate documents."""
    meta: dict[str, Any]
    """What meta.json holds; empty without one."""


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
                return tokenizer_from_meta(source.meta["tokenizer"], source.entry.directory)
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
        """Return tokens of a split, over all sources."""
        return sum(source.tokens[split].size for source in self.sources)

    def find_document(self, source: int, split: str, offset: int) -> Document:
        """Return the document of a token of a split, with token numbers over the whole source."""
        opened = self.sources[source]
        tokens, documents = opened.tokens[split], opened.documents
        if documents is None:
            if self.tokenizer is None or self.tokenizer.end_of_text is None:
                return Document(None, None, None)
            documents = MarkedDocuments(tokens, self.tokenizer.end_of_text)
        return documents.find(tokens.first + offset)

    @functools.cached_property
    def fingerprints(self) -> list[list[str]]:
        """[path, hash of its sizes, dtype, vocabulary and sampled pages] of every source."""
        return [
            [
                str(source.entry.path),
                fingerprint(
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
        """Return lines for the log: how many tokens there are, and of what."""
        sizes = f"{self.size('train'):,} tokens to train on, {self.size('val'):,} to validate"
        kinds = {f"{s.format} {s.tokens['train'].dtype.name}" for s in self.sources}
        kinds = ", ".join(sorted(kinds))
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
        """Read up to 64 MiB of the files for what `open_dataset` cannot see.

        Raises:
            UsageError: if a token is outside the vocabulary, or the files are not those that
                their meta.json was written for.
        """
        for source, (path, found) in zip(self.sources, self.fingerprints, strict=True):
            for tokens in source.tokens.values():
                for start, page in tokens.sampled_pages(self._pages_of_each):
                    tokens.check_vocab_range(page, start, self.vocab_size)
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
    """Return the sources that a configuration names.

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
    """Return V of a configuration, whether or not its data has been prepared on this machine.

    Raises:
        UsageError: if nothing says.
    """
    named = entries(data)
    opened = [_open_files(entry, data) for entry in named if _format_of(entry.path)]
    found = model.vocab_size or max([source.meta.get("vocab_size", 0) for source in opened] or [0])
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
    """Open the files that a configuration names, without reading tokens.

    Raises:
        UsageError: if files are missing, damaged or too short for one row, the vocabulary is
            not known or larger than model.vocab_size, or sources have different tokenizers.
    """
    sources = tuple(_open_source(entry, data, model.block_size + 1) for entry in entries(data))
    files = {file for s in sources for tokens in s.tokens.values() for file in tokens.files}
    allow_open_files(len(files))
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
    """Open one source, whose splits need `least` tokens each."""
    opened = _open_files(entry, data)
    splits = dict(opened.splits)
    note = ""
    if "val" not in splits:
        whole = splits["train"]
        boundary = round(whole.size * (1 - data.val_share))
        if opened.documents is not None:
            boundary = opened.documents.find(min(boundary, whole.size - 1)).start
        splits = {"train": whole.part(0, boundary), "val": whole.part(boundary, whole.size)}
        note = f" with data.val_share={data.val_share}"
    for split in SPLITS:
        tokens = splits[split]
        if tokens.size < least:
            raise UsageError(
                f"{entry.key}: {tokens.files[0].path} has {tokens.size} tokens for split {split}"
                f"{note}; model.block_size={least - 1} needs at least {least}: give more data"
                + (", or another data.val_share" if note else "")
            )
    return Source(entry, _format_of(entry.path), splits, opened.documents, opened.meta)


def _format_of(path: Path) -> str | None:
    return next((name for name, f in FORMATS.items() if f.recognise(path)), None)


def _open_files(entry: BlendEntry, data: DataConfig) -> OpenSource:
    name = _format_of(entry.path)
    if name is None:
        raise UsageError(
            f"{entry.key}: there is no token data at {entry.path}; {_remedy(entry, data)}"
        )
    try:
        return FORMATS[name].open(entry.path)
    except UsageError as error:
        raise UsageError(f"{entry.key}: {error}") from None
    except OSError as error:
        raise UsageError(
            f"{entry.key}: {error.filename} cannot be read ({error.strerror}); ask its owner to "
            "let you, or give another path"
        ) from None


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
