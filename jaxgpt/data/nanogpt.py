"""nanoGPT's files: flat arrays of token ids, uint16 or uint32, little-endian.

A folder has train.bin, val.bin and, where jaxgpt wrote it, meta.json. A lone .bin is one of them,
without a file for validation. FILE.mask.bin beside FILE.bin is its loss mask, a byte for each
token: 1 if the token counts as a target, or 0.
"""

from pathlib import Path
from typing import Any

import numpy as np

from jaxgpt.config import UsageError
from jaxgpt.data.source import SPLITS, OpenSource, read_meta
from jaxgpt.data.token_file import TokenFile, Tokens


def is_folder(path: Path) -> bool:
    """Return whether `path` is a folder with train.bin and val.bin, or one of them."""
    return any((path / f"{split}.bin").is_file() for split in SPLITS)


def open_folder(path: Path) -> OpenSource:
    """Open train.bin and val.bin."""
    meta = read_meta(path)
    return OpenSource({s: _open(path / f"{s}.bin", meta) for s in SPLITS}, meta=meta)


def is_file(path: Path) -> bool:
    """Return whether `path` is a .bin file."""
    return path.suffix == ".bin" and path.is_file()


def open_file(path: Path) -> OpenSource:
    """Open a lone .bin, of the dtype that a meta.json beside it says."""
    meta = read_meta(path.parent)
    tokens = _open(path, meta)
    meta.pop("fingerprint", None)  # it is of the whole folder
    return OpenSource({"train": tokens}, meta=meta)


def mask_path(path: Path) -> Path:
    """Return the path of the loss mask of a file of tokens."""
    return path.with_suffix(".mask.bin")


def _open(path: Path, meta: dict[str, Any]) -> Tokens:
    if not path.is_file():
        raise UsageError(f"there is no {path}; copy it or prepare the data again")
    dtype = np.dtype(meta.get("dtype", "uint16"))
    size = path.stat().st_size
    n_tokens = meta.get("tokens", {}).get(path.stem, size // dtype.itemsize)
    if size != n_tokens * dtype.itemsize:
        raise UsageError(
            f"{path} has {size} bytes, but {n_tokens} tokens of {dtype.name} have "
            f"{n_tokens * dtype.itemsize}; copy it or prepare the data again"
        )
    return Tokens(TokenFile(path, dtype, n_tokens), mask=_open_mask(path, n_tokens, meta))


def _open_mask(path: Path, n_tokens: int, meta: dict[str, Any]) -> TokenFile | None:
    """Open the mask of a file of tokens, if meta.json names one or, without meta.json, is there."""
    mask = mask_path(path)
    if not (path.stem in meta.get("targets", {}) if meta else mask.is_file()):
        if mask.is_file():
            raise UsageError(
                f'{mask}: meta.json does not name it; add "targets": {{"{path.stem}": N}}, where N '
                "is the number of its ones, or remove the file"
            )
        return None
    if not mask.is_file():
        raise UsageError(f"there is no {mask}; copy it or prepare the data again")
    size = mask.stat().st_size
    if size != n_tokens:
        raise UsageError(
            f"{mask} has {size} bytes, but {path.name} has {n_tokens} tokens, and a mask has a "
            "byte for each; copy both files or prepare the data again"
        )
    return TokenFile(mask, np.dtype(np.uint8), n_tokens)
