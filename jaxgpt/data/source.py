"""Token sources with their splits, documents and meta.json."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from jaxgpt.config import UsageError, read_json
from jaxgpt.data.token_file import Tokens

SPLITS = ("train", "val")  # the splits needed for training
ALL_SPLITS = (*SPLITS, "test")
PARTS = ".parts"  # subfolder of a dataset that is still being prepared
SHAPE = {  # the expected structure of meta.json, for `read_json`
    "dtype": str, "vocab_size": int, "tokenizer": {"type": str}, "tokens?": {str: int},
    "fingerprint?": str, "targets?": {str: int},
}  # fmt: skip


class Document(NamedTuple):
    """The document that contains a token."""

    number: int  # number of the document in the source, from 0
    start: int  # offset of its first token in the source


# Maps the offset of a token in the whole source to the token's document, in O(log n) reads.
FindDocument = Callable[[int], Document]


@dataclass(frozen=True)
class OpenSource:
    """A token source, as returned by `Format.open`."""

    # Tokens of each split. If there is "train" but no "val", a run validates on the end of "train".
    tokens: dict[str, Tokens]
    find_document: FindDocument | None = None  # None if there is no document index
    # Contents of the source's meta.json, or {} if there is none, as for Megatron data. The
    # `fingerprint` is left out if it was computed from other tokens.
    meta: dict[str, Any] = field(default_factory=dict)


class Format(NamedTuple):
    """A storage format for tokens.

    Both functions take the path of a source, such as data.path, and may raise `OSError` if a file
    or folder cannot be read.
    """

    # True if a path has this format. Some of its files may be missing.
    recognize: Callable[[Path], bool]
    open: Callable[[Path], OpenSource]
    """Opens a path that `recognize` accepts, without reading tokens. Raises `UsageError` if files
    are missing or invalid, and `UsageError` or `OSError` if metadata cannot be read."""


def read_meta(directory: Path) -> dict[str, Any]:
    """Return the contents of meta.json in `directory`, or {} if there is no such file.

    Raises:
        OSError: if the file cannot be read.
        UsageError: if its contents are invalid.
    """
    path = directory / "meta.json"
    if not path.is_file():
        return {}
    try:
        meta = read_json(path, SHAPE)
        if meta["dtype"] not in ("uint16", "uint32"):
            raise ValueError(f"dtype is {meta['dtype']}, not uint16 or uint32")
    except ValueError as error:
        raise UsageError(
            f"{path} is not valid ({error}); prepare the data again with python -m jaxgpt.prepare"
        ) from None
    return meta
