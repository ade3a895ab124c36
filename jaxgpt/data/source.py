"""An opened source of tokens: its splits, its documents, and what meta.json says of it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from jaxgpt.config import UsageError, read_json
from jaxgpt.data.token_file import Tokens

SPLITS = ("train", "val")
SHAPE = {  # of meta.json
    "dtype": str, "vocab_size": int, "tokenizer": {"type": str}, "tokens?": {str: int},
    "fingerprint?": str, "targets?": {str: int},
}  # fmt: skip


class Document(NamedTuple):
    """A document that a token belongs to; None stands for what is not known."""

    number: int | None = None
    start: int | None = None  # of its tokens in the source
    end: int | None = None  # the token after its last one


# Number of a token in a whole source -> its document, in at most O(log documents) reads.
FindDocument = Callable[[int], Document]


@dataclass(frozen=True)
class OpenSource:
    """What a format's `open` returns."""

    # "train" and "val"; or "train" alone, whose last documents are then kept for validation.
    tokens: dict[str, Tokens]
    find_document: FindDocument | None = None  # None where no index names them
    meta: dict[str, Any] = field(default_factory=dict)  # what meta.json holds


class Format(NamedTuple):
    """A way to store tokens."""

    recognise: Callable[[Path], bool]  # a path as data.path gives it
    open: Callable[[Path], OpenSource]  # without reading tokens; UsageError for what is damaged


def read_meta(directory: Path) -> dict[str, Any]:
    """Return what `directory`/meta.json holds, or {}; UsageError if `prepare` did not write it."""
    path = directory / "meta.json"
    if not path.is_file():
        return {}
    try:
        meta = read_json(path, SHAPE)
        if meta["dtype"] not in ("uint16", "uint32"):
            raise ValueError(f"dtype is {meta['dtype']}")
    except ValueError as error:
        raise UsageError(
            f"{path} is not what python -m jaxgpt.prepare writes ({error}); prepare the data again"
        ) from None
    return meta
