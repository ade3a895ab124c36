"""Conversion of a corpus to a dataset in nanoGPT's or Megatron-LM's format."""

import itertools
import os
import shutil
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxgpt.config import UsageError
from jaxgpt.data.prepare.files import TEXT, count_characters, kind
from jaxgpt.data.prepare.json_lines import LineFormat
from jaxgpt.data.prepare.parts import Part, join, parts_folder, write_parts
from jaxgpt.data.prepare.text import InputFile, characters_of
from jaxgpt.data.prepare.writer import new_dataset, scratch_folder, token_dtype, write_index
from jaxgpt.data.source import SPLITS, read_meta
from jaxgpt.data.tokenizers import CharTokenizer, Tokenizer

TEXT_SHARE, DOCUMENT_SHARE = 0.1, 0.01  # default validation shares of text and of documents
FEW_DOCUMENTS = 1000  # with fewer documents, DOCUMENT_SHARE would select fewer than about ten
_MEGATRON_UINT16 = 65500  # from this vocabulary size on, Megatron-LM stores token IDs as int32


@dataclass(frozen=True)
class Corpus:
    """Input files and the settings for dividing them into splits."""

    files: list[Path]  # at least one
    lines: LineFormat  # the format of JSON lines and Parquet rows
    val_share: float | None = None  # if None, a default applies; if 0, all of the text is in train
    split: str | None = None  # the split for all of the text; if None, val_share applies

    @property
    def is_text(self) -> bool:
        """True if all files are text files."""
        return all(kind(path) is TEXT for path in self.files)

    @property
    def only_split(self) -> str | None:
        """The split for all of the text; None if the text is divided."""
        return "train" if self.split is None and self.val_share == 0 else self.split

    def share(self, default: float) -> float:
        """Return the validation share, or `default` if it is not set."""
        return default if self.val_share is None else self.val_share

    def divided(self, pool: Executor | None) -> list[InputFile]:
        """Return the input files, each with the rule for dividing it into splits.

        If there is an `only_split`, no file is divided. If there is none and all files are text,
        their concatenated text is divided at one position. In all other cases, a hash of each
        document's text selects the document's split. `pool` counts the characters of text files in
        parallel.
        """
        if self.only_split is not None:
            return [InputFile(path, self.lines) for path in self.files]
        if not self.is_text:
            share = self.share(DOCUMENT_SHARE)
            return [InputFile(path, self.lines, val_share=share) for path in self.files]
        sizes = list((pool.map if pool else map)(count_characters, self.files))
        n_train = int(sum(sizes) * (1 - self.share(TEXT_SHARE)))
        starts = itertools.accumulate(sizes, initial=0)
        return [
            InputFile(path, self.lines, n_train=min(max(0, n_train - start), size))
            for path, start, size in zip(self.files, starts, sizes, strict=False)
        ]


class Prepared(NamedTuple):
    """Result of `write_nanogpt` or `write_megatron`."""

    tokenizer: Tokenizer
    tokens: dict[str, int]  # number of tokens in each split
    targets: dict[str, int]  # number of targets in each split; empty without a loss mask
    documents: int  # number of documents that have text
    division: str  # how the text was divided into splits; empty for Megatron data


class _Division(NamedTuple):
    """Rule for building a dataset's splits from the splits of its parts."""

    joined: dict[str, tuple[str, ...]]  # split -> which splits of the parts to concatenate
    cut: float | None  # fraction of "train" to move to "val", or None
    description: str


def write_nanogpt(
    corpus: Corpus,
    directory: Path,
    tokenizer: Tokenizer | None,
    source: str,
    pool: Executor | None = None,
) -> Prepared:
    """Write SPLIT.bin, meta.json and the tokenizer's file, if any, to `directory`.

    Old splits and masks in `directory` are replaced or deleted. If the tokenizer has an end-of-text
    token, this token separates documents. If the documents have answers, each split also gets a
    loss mask, SPLIT.mask.bin. If `tokenizer` is None, each distinct character becomes a token.
    `source` describes the origin of the text. `pool` tokenizes files in parallel and does not
    affect the result. Raises `UsageError` if a file is a pipe and any file must be read twice, or
    if a split would have fewer than two tokens or the vocabulary fewer than two entries.
    """
    pipe = next((p for p in corpus.files if os.path.exists(p) and not os.path.isfile(p)), None)
    counts_text = corpus.only_split is None and any(kind(path) is TEXT for path in corpus.files)
    if pipe and (tokenizer is None or counts_text):
        raise UsageError(
            f"--input {pipe}: is not a regular file, but text files (and JSON lines with "
            "--tokenizer char) are read twice; write it to a regular file first"
        )
    if tokenizer is None:
        files = [InputFile(path, corpus.lines) for path in corpus.files]
        tokenizer = CharTokenizer(set().union(*(pool.map if pool else map)(characters_of, files)))
    dtype = token_dtype(tokenizer.vocab_size)
    with parts_folder(directory) as folder:
        parts = write_parts(corpus.divided(pool), tokenizer, dtype, folder, pool)
        division = _divide(corpus, parts)
        spare = {  # drop the end-of-text token after a split's last document
            split: int(tokenizer.end_of_text is not None and _has_ended(parts, names))
            for split, names in division.joined.items()
        }
        tokens = {
            split: max(0, _count(parts, names) - spare[split])
            for split, names in division.joined.items()
        }
        if division.cut is not None:
            whole = tokens["train"]
            tokens["train"] = int(whole * (1 - division.cut))
            tokens["val"] = whole - tokens["train"]
        if min(tokens.values()) < 2 or tokenizer.vocab_size < 2:
            shutil.rmtree(folder)  # the same input and split would fail again
            sizes = [f"{n} tokens for {split}" for split, n in tokens.items()]
            if corpus.only_split:
                sizes = [f"{n} tokens" for n in tokens.values()]
            remedy = "" if corpus.only_split else " or change --val-share"
            raise UsageError(
                f"--input: {' and '.join(sizes)} with a vocabulary of {tokenizer.vocab_size} are "
                f"too few; provide more text{remedy}"
            )
        with new_dataset(directory, tokenizer, source) as scratch:
            for suffix, size in ((".bin", dtype.itemsize), (".mask.bin", 1)):
                if suffix == ".mask.bin" and not any(part.has_mask for part in parts):
                    continue
                for split, names in division.joined.items():
                    path = scratch / f"{split}{suffix}"
                    join(parts, names, suffix, path)
                    os.truncate(path, path.stat().st_size - spare[split] * size)
                if division.cut is not None:
                    start = tokens["train"] * size
                    _move_tail(scratch / f"train{suffix}", scratch / f"val{suffix}", start)
    documents = sum(part.documents for part in parts)
    targets = read_meta(directory).get("targets", {})
    return Prepared(tokenizer, tokens, targets, documents, division.description)


def _divide(corpus: Corpus, parts: Sequence[Part]) -> _Division:
    """Return the rule for building a dataset's splits from its parts.

    `parts` must contain the tokens of the files that `Corpus.divided` returned.
    """
    if (split := corpus.only_split) is not None:
        rest = "; runs validate on its end (data.val_share)" if split == "train" else ""
        return _Division({split: ("train",)}, None, f"all text is in {split}.bin{rest}")
    separate = {split: (split,) for split in SPLITS}
    if corpus.is_text:
        share = corpus.share(TEXT_SHARE)
        return _Division(separate, None, f"validation: the last {100 * share:g}% of the text")
    documents = sum(part.documents for part in parts)
    is_few = corpus.val_share is None and documents < FEW_DOCUMENTS
    if is_few or any(_count(parts, names) == 0 for names in separate.values()):
        share = corpus.share(TEXT_SHARE)
        return _Division(
            {"train": SPLITS}, share,
            f"validation: the last {100 * share:g}% of the tokens, cut within a document, because "
            f"there are only {documents:,} documents",
        )  # fmt: skip
    share = corpus.share(DOCUMENT_SHARE)
    drawn = f"validation: {100 * share:g}% of the documents, selected by a hash of their text"
    return _Division(separate, None, drawn)


def _count(parts: Sequence[Part], splits: Sequence[str]) -> int:
    """Return the total number of tokens in the given splits of all parts."""
    return sum(part.tokens.get(split, 0) for part in parts for split in splits)


def _has_ended(parts: Sequence[Part], splits: Sequence[str]) -> bool:
    """Return whether the last part with tokens in the given splits ends with a complete document.

    Returns False if these splits have no tokens.
    """
    ends = [part.ends[split] for part in parts for split in splits if split in part.ends]
    return bool(ends and ends[-1])


def _move_tail(path: Path, tail: Path, start: int) -> None:
    """Move the bytes of a file from offset `start` onward to the new file `tail`."""
    with open(path, "r+b") as source, open(tail, "wb") as target:
        source.seek(start)
        shutil.copyfileobj(source, target, 1 << 24)
        source.truncate(start)


def write_megatron(
    corpus: Corpus, prefix: Path, tokenizer: Tokenizer, pool: Executor | None = None
) -> Prepared:
    """Write all text to PREFIX.bin and PREFIX.idx, without dividing it into splits.

    If the tokenizer has an end-of-text token, each document ends with this token. Token IDs are
    uint16 if the vocabulary has fewer than 65,500 entries, and int32 otherwise. `pool` tokenizes
    files in parallel and does not affect the result. Raises `UsageError` if the input is empty or
    needs a loss mask.
    """
    dtype = np.dtype("<u2" if tokenizer.vocab_size < _MEGATRON_UINT16 else "<i4")
    files = [InputFile(path, corpus.lines) for path in corpus.files]
    with parts_folder(prefix.parent) as folder:
        parts = write_parts(files, tokenizer, dtype, folder, pool)
        tokens = {"train": _count(parts, ["train"])}
        if tokens["train"] == 0:
            shutil.rmtree(folder)
            raise UsageError("--input: contains no text; give other files")
        if any(part.has_mask for part in parts):
            shutil.rmtree(folder)
            raise UsageError(
                "--format megatron: cannot store the loss mask of prompts and messages; use "
                "--format nanogpt"
            )
        with scratch_folder(prefix.parent) as scratch:
            join(parts, ["train"], ".bin", scratch / f"{prefix.name}.bin")
            lengths = [np.fromfile(part.folder / "lengths.bin", "<i8") for part in parts]
            write_index(scratch / f"{prefix.name}.idx", dtype, np.concatenate(lengths))
            Path(f"{prefix}.idx").unlink(missing_ok=True)  # the old index does not match the tokens
    documents = sum(part.documents for part in parts)
    return Prepared(tokenizer, tokens, {}, documents, "")
