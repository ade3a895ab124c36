"""The dataset of a run: one source of tokens, or a blend of several sources."""

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from jaxgpt.config import Config, DataConfig, ModelConfig, UsageError, expand_user, nearest
from jaxgpt.data import FORMATS
from jaxgpt.data.blend import BlendEntry, parse_lines, read_file_list
from jaxgpt.data.source import PARTS, SPLITS, Document, OpenSource
from jaxgpt.data.token_file import SAMPLED_PAGES, allow_open_files, fingerprint
from jaxgpt.data.tokenizers import Tokenizer, load_tokenizer, tokenizer_from_meta

BUILT_IN = {"python": 256, "shakespeare_char": 65}  # vocabulary sizes of the built-in datasets


@dataclass(frozen=True, kw_only=True)
class Source(OpenSource):
    """A source of an open dataset, with only the splits that `open_dataset` keeps."""

    entry: BlendEntry
    format: str  # key in `FORMATS`


@dataclass(frozen=True)
class Dataset:
    """The sources of a run, with their vocabulary size and tokenizer."""

    sources: tuple[Source, ...]
    vocab_size: int
    tokenizer: Tokenizer | None  # None if it is unknown

    @property
    def tokenizer_meta(self) -> dict[str, Any] | None:
        """JSON description of the tokenizer, or None if it is unknown."""
        return None if self.tokenizer is None else self.tokenizer.to_meta()

    @functools.cached_property
    def corpora(self) -> tuple[str, ...]:
        """The names of the corpora, in order of first appearance."""
        return tuple(dict.fromkeys(source.entry.corpus for source in self.sources))

    @property
    def has_masks(self) -> bool:
        """True if any open split has a loss mask."""
        splits = (tokens for source in self.sources for tokens in source.tokens.values())
        return any(tokens.mask is not None for tokens in splits)

    def size(self, split: str) -> int:
        """Return the total number of tokens in a split. Every source must have this split."""
        return sum(source.tokens[split].size for source in self.sources)

    def find_document(self, source: int, split: str, offset: int) -> Document | None:
        """Return the document that contains the token at `offset` in a split of a source.

        `source` is an index into `sources`. The document's `start` is an offset in the source, not
        in the split. Returns None if the source has no document index.
        """
        tokens, find = self.sources[source].tokens[split], self.sources[source].find_document
        return None if find is None else find(tokens.first + offset)

    @functools.cached_property
    def fingerprints(self) -> list[list[str]]:
        """[path, hash] for each source. The hash is the `fingerprint` of the source's open splits.

        Only a sample of the pages is hashed (see `verify`).
        """
        pages, out = self._pages_of_each, []
        for source in self.sources:
            vocab_size = source.meta.get("vocab_size", self.vocab_size)
            out.append([str(source.entry.path), fingerprint(source.tokens, vocab_size, pages)])
        return out

    @property
    def _pages_of_each(self) -> int:
        return max(16, SAMPLED_PAGES // len(self.sources))

    def describe(self) -> list[str]:
        """Return log lines that describe the dataset. Its splits must include train and val."""
        kinds = {f"{s.format} {s.tokens['train'].dtype.name}" for s in self.sources}
        place = f"{len(self.sources)} sources of {len(self.corpora)} corpora"
        if len(self.sources) == 1:
            place = self.sources[0].entry.path
        lines = [
            f"data: {place} ({', '.join(sorted(kinds))}), {self.size('train'):,} training tokens, "
            f"{self.size('val'):,} validation tokens, vocabulary size {self.vocab_size}"
        ]
        whole = sum(source.entry.weight for source in self.sources)
        for corpus in self.corpora if len(self.sources) > 1 else ():
            members = [s for s in self.sources if s.entry.corpus == corpus]
            share = float(sum(s.entry.weight for s in members) / whole)
            tokens = sum(s.tokens["train"].size for s in members)
            lines.append(
                f"corpus {corpus}: {share:.4%} of all samples, {tokens:,} tokens, "
                f"sources: {len(members)}"
            )
        masked = [s for s in self.sources if s.tokens["train"].mask is not None]
        if masked:
            counted = [s.meta.get("targets", {}).get("train") for s in masked]
            size = sum(s.tokens["train"].size for s in masked)
            share = (
                ""
                if None in counted
                else f"; {sum(counted):,} of their {size:,} tokens count as targets"
            )
            lines.append(f"loss mask: in {len(masked)} of {len(self.sources)} sources{share}")
        return lines

    def verify(self) -> None:
        """Check a sample of each source's pages.

        The sample is limited to 64 MiB of tokens per split, divided evenly among the sources. Each
        source's share is at least 16 pages, even if the sample then exceeds this limit.

        Raises:
            UsageError: if the sample has a token outside the vocabulary or a mask byte other than 0
                or 1, or if the open splits of a dataset with a single source do not match the
                fingerprint in the source's `meta`.
        """
        for source, (path, found) in zip(self.sources, self.fingerprints, strict=True):
            for tokens in source.tokens.values():
                for start, page in tokens.sampled_pages(self._pages_of_each):
                    tokens.check_vocab_range(page, start, self.vocab_size)
            written = source.meta.get("fingerprint", found)
            # For a blend, `found` may cover fewer pages than the fingerprint in meta.json.
            if written != found and self._pages_of_each == SAMPLED_PAGES:
                raise UsageError(
                    f"{path}: the token files do not match the fingerprint in meta.json; "
                    "prepare the data again"
                )


def dataset_directory(data: DataConfig) -> Path:
    """Return data.path or, if it is not set, the folder where data.dataset is stored.

    The folder need not exist. data.blend and data.file_list are ignored. Datasets are stored in
    $JAXGPT_DATA (default: ~/.cache/jaxgpt).
    """
    if data.path is not None:
        return Path(data.path)
    key = f"data.dataset={data.dataset}: "
    home = os.environ.get("JAXGPT_DATA") or expand_user("~/.cache/jaxgpt", key)
    return Path(home) / data.dataset


def entries(data: DataConfig) -> list[BlendEntry]:
    """Return the sources in a configuration, without opening them."""
    if data.file_list is not None:
        key, lines = f"data.file_list={data.file_list}", read_file_list(Path(data.file_list))
    elif data.blend:
        key, lines = "data.blend", list(data.blend)
    else:
        key = f"data.dataset={data.dataset}" if data.path is None else f"data.path={data.path}"
        directory = dataset_directory(data)
        return [BlendEntry(Fraction(1), "1", directory, directory.name, key)]
    return parse_lines(lines, key)


def with_vocabulary(config: Config, dataset: Dataset) -> Config:
    """Return `config` with model.vocab_size and, if needed, data.end_of_text from the data.

    If data.document_mask is set and data.end_of_text is None, data.end_of_text is set to the ID of
    the tokenizer's end-of-text token. Raises `UsageError` if data.document_mask is set and the
    end-of-text token is unknown.
    """
    config = config.replace(model__vocab_size=dataset.vocab_size)
    _check_dtype_is_known(dataset)
    end = dataset.tokenizer.end_of_text if dataset.tokenizer else None
    if config.data.document_mask and config.data.end_of_text is None and end is None:
        raise UsageError(
            "data.document_mask=True: the end-of-text token of the data is unknown; set its ID "
            "with data.end_of_text=N"
        )
    return _with_end_of_text(config, end)


def with_planned_vocabulary(config: Config) -> Config:
    """Return `config` with model.vocab_size from `vocabulary_size`, without opening the data.

    If data.document_mask is set and data.end_of_text is None, data.end_of_text is set to 0.
    """
    vocab_size = vocabulary_size(config.data, config.model)
    return _with_end_of_text(config.replace(model__vocab_size=vocab_size), 0)


def _with_end_of_text(config: Config, default: int | None) -> Config:
    """Return `config` with data.end_of_text set to `default` if it is needed and None.

    Raises `UsageError` if the end-of-text token is needed but not in the vocabulary.
    """
    if not config.data.document_mask:
        return config
    end = default if config.data.end_of_text is None else config.data.end_of_text
    if end >= config.model.vocab_size:
        raise UsageError(
            f"data.end_of_text={end}: must be less than model.vocab_size={config.model.vocab_size}"
        )
    return config.replace(data__end_of_text=end)


def _check_dtype_is_known(dataset: Dataset) -> None:
    """Raise `UsageError` if a nanoGPT source has no meta.json and its tokens seem to be uint32.

    If they are read as uint16, every second token is the upper half of a token, so it is small.
    Such tokens pass every other check if the vocabulary is large.
    """
    for source in dataset.sources:
        if not source.format.startswith("nanoGPT") or source.meta or dataset.vocab_size <= 2**16:
            continue
        tokens = next(iter(source.tokens.values()))
        start = tokens.read(0, min(tokens.size, 1000))
        if (start[1::2] <= (dataset.vocab_size - 1) >> 16).all():
            raise UsageError(
                f"model.vocab_size={dataset.vocab_size}: {source.entry.path} has no meta.json, so "
                "its tokens are read as uint16, but they seem to be uint32; write a meta.json with "
                "their dtype (see jaxgpt/data/DETAILS.md), or prepare the data with python -m "
                "jaxgpt.prepare"
            )


def vocabulary_size(data: DataConfig, model: ModelConfig) -> int:
    """Return the vocabulary size of a configuration.

    If model.vocab_size is set, no file is read. Otherwise, the data must exist, unless
    data.tokenizer is set or the data is a built-in dataset. Raises `UsageError` if the size is
    unknown, or if a source's tokenizer differs from data.tokenizer or from another source's.
    """
    if model.vocab_size:
        return model.vocab_size
    named = entries(data)
    metas = [(e, _open_files(e, data)[1].meta if _format_of(e) else {}) for e in named]
    is_by_name = named[0].key.startswith("data.dataset=") and data.tokenizer is None
    if is_by_name and data.dataset in BUILT_IN and not metas[0][1]:
        return BUILT_IN[data.dataset]
    return _find_vocabulary(data, model, metas)[0]


def open_dataset(
    data: DataConfig, model: ModelConfig, splits: Sequence[str] | None = SPLITS
) -> Dataset:
    """Open the data that a configuration selects. Token files are opened on the first read.

    If `splits` is None, each source keeps the splits found in its files. If `splits` is given and a
    source has no validation split, the end of its training split is used for validation. The
    process's limit on open files is raised if necessary.

    Raises:
        UsageError: if a source has no token data, cannot be read, does not have all of the `splits`
            or has a split that is too short for one row, if the vocabulary size is unknown or
            larger than model.vocab_size, or if a source's tokenizer differs from data.tokenizer or
            from another source's.
    """
    least = model.block_size + 1
    sources = tuple(_open_source(entry, data, least, splits) for entry in entries(data))
    splits = [tokens for source in sources for tokens in source.tokens.values()]
    files = {tokens.file for tokens in splits} | {tokens.mask for tokens in splits} - {None}
    allow_open_files(len(files))
    return Dataset(sources, *_find_vocabulary(data, model, [(s.entry, s.meta) for s in sources]))


def _find_vocabulary(
    data: DataConfig, model: ModelConfig, metas: Sequence[tuple[BlendEntry, dict[str, Any]]]
) -> tuple[int, Tokenizer | None]:
    """Return the vocabulary size and the tokenizer (None if unknown).

    Both come from data.tokenizer or the meta.json files, unless model.vocab_size sets the size.
    """
    tokenizer, name, known = None, None, 0
    key = metas[0][0].key
    if data.tokenizer is not None:
        tokenizer = load_tokenizer(Path(data.tokenizer))
        name, known = f"data.tokenizer={data.tokenizer}", tokenizer.vocab_size
    for entry, meta in metas:
        if meta and tokenizer is None:
            tokenizer = tokenizer_from_meta(meta["tokenizer"], entry.directory)
            name, known = entry.path, meta["vocab_size"]
        elif meta and meta["tokenizer"] != tokenizer.to_meta():
            raise UsageError(
                f"{key}: {entry.path} has a different tokenizer from {name}; prepare both with "
                "the same tokenizer"
            )
    vocab_size = model.vocab_size or known
    if not vocab_size:
        raise UsageError(
            f"{key}: the vocabulary size is unknown, because {metas[0][0].path} has no meta.json; "
            "set model.vocab_size=N (50257 for GPT-2) or data.tokenizer=FILE, or prepare the data "
            "with python -m jaxgpt.prepare"
        )
    if known > vocab_size:
        raise UsageError(
            f"model.vocab_size={vocab_size}: {name} has a vocabulary of {known}; "
            f"set it to None or to at least {known}"
        )
    return vocab_size, tokenizer


def _open_source(
    entry: BlendEntry, data: DataConfig, least: int, splits: Sequence[str] | None
) -> Source:
    """Open a source and check that each of its splits has at least `least` tokens."""
    name, opened = _open_files(entry, data)
    tokens, meta, note = opened.tokens, opened.meta, ""
    if splits is not None and "train" in tokens and "val" not in tokens:
        whole = tokens["train"]
        boundary = round(whole.size * (1 - data.val_share))
        if opened.find_document is not None:
            boundary = opened.find_document(min(boundary, whole.size - 1)).start
        divided = {"train": whole.part(0, boundary), "val": whole.part(boundary, whole.size)}
        tokens = tokens | divided
        # These describe the train split before it was divided.
        meta = {key: meta[key] for key in meta if key not in ("fingerprint", "targets")}
        note = f" with data.val_share={data.val_share}"
    for split in splits or tokens:
        if split not in tokens:
            raise UsageError(
                f"{entry.key}: {entry.path} has no split {split}, but only "
                f"{', '.join(opened.tokens)}; give other data, or prepare the split in a folder of "
                f"its own with --split {split}; jaxgpt.evaluate --input FILE scores a text file"
            )
        if tokens[split].size < least:
            remedy = "add data or reduce model.block_size"
            find = opened.find_document
            if note and find is not None and find(whole.size - 1).number == 0:
                remedy = (
                    "Megatron data is split between documents, and this file has only one; prepare "
                    "the text as several documents, or as a folder with jaxgpt.prepare, which can "
                    "split a document"
                )
            elif note:
                remedy += ", or change data.val_share"
            raise UsageError(
                f"{entry.key}: {tokens[split].file.path} has {tokens[split].size} tokens for split "
                f"{split}{note}, but at least {least} are needed; {remedy}"
            )
    tokens = {split: tokens[split] for split in splits or tokens}
    return Source(tokens, opened.find_document, meta, entry=entry, format=name)


def _format_of(entry: BlendEntry) -> str | None:
    """Return the name of a source's format, or None if no format recognizes it."""
    try:
        return next((name for name, f in FORMATS.items() if f.recognize(entry.path)), None)
    except OSError as error:
        raise _unreadable(entry, error) from None


def _open_files(entry: BlendEntry, data: DataConfig) -> tuple[str, OpenSource]:
    """Open a source. Return the name of its format, and its contents."""
    name = _format_of(entry)
    if name is None and entry.path.is_file():
        raise UsageError(
            f"{entry.key}: {entry.path} is not a token file; if it is text, run python -m "
            f"jaxgpt.prepare text --input {entry.path} --name NAME, then set data.dataset=NAME"
        )
    if name is None:
        remedy = _remedy(entry.path)
        if entry.key.startswith("data.dataset="):
            is_built_in = data.dataset in BUILT_IN
            made_by = data.dataset if is_built_in else f"text --name {data.dataset} --input FILE"
            remedy = f"run `python -m jaxgpt.prepare {made_by}`, or give data.path=DIR"
            siblings = (path.name for path in entry.path.parent.glob("*/"))
            if near := nearest(data.dataset, {*BUILT_IN, *siblings} - {data.dataset}, 0.75):
                remedy = f"did you mean data.dataset={near}? Otherwise, {remedy}"
        place = "" if entry.key.endswith(f"={entry.path}") else f" at {entry.path}"
        raise UsageError(f"{entry.key}: there is no token data{place}; {remedy}")
    try:
        return name, FORMATS[name].open(entry.path)
    except UsageError as error:
        raise UsageError(f"{entry.key}: {error}") from None
    except OSError as error:
        raise _unreadable(entry, error) from None


def _unreadable(entry: BlendEntry, error: OSError) -> UsageError:
    return UsageError(
        f"{entry.key}: {error.filename} cannot be read ({error.strerror}); ask its owner for "
        "permission, or give another path"
    )


def _remedy(path: Path) -> str:
    """Return advice for the user about a path that has no token data."""
    if (path / PARTS).is_dir():
        return "its preparation was interrupted; run the same jaxgpt.prepare command again"
    for suffix, kind in (".idx", "Megatron pairs"), (".bin", "token files"):
        if found := sorted(path.glob(f"*{suffix}")):
            each = [str(file.with_suffix("") if suffix == ".idx" else file) for file in found]
            if len(each) == 1:
                return f"give data.path={each[0]}"
            return (
                f"it has {len(each)} {kind}; give one of them, such as data.path={each[0]}, or "
                "list them in a file, one `WEIGHT PATH` per line, and set data.file_list=FILE"
            )
    if any(path.glob("*")):
        return (
            f"to make token data from its text files, run python -m jaxgpt.prepare text --input "
            f"{path} --name NAME, then set data.dataset=NAME"
        )
    return (
        "give a folder with train.bin, val.bin and meta.json, a nanoGPT .bin file or a "
        "Megatron prefix; python -m jaxgpt.prepare text --input FILE makes a folder from text"
    )
