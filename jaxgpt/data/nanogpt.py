"""nanoGPT's files: flat arrays of token IDs, uint16 or uint32, little-endian.

A folder has one or more of train.bin, val.bin and test.bin. A folder that jaxgpt wrote also has
meta.json. A single .bin file has no separate validation data. The loss mask of FILE.bin is
FILE.mask.bin, with one byte per token: 1 if the token counts as a target, 0 if not.
"""

from pathlib import Path
from typing import Any

import numpy as np

from jaxgpt.config import UsageError
from jaxgpt.data.source import ALL_SPLITS, OpenSource, read_meta
from jaxgpt.data.token_file import TokenFile, Tokens


def is_folder(path: Path) -> bool:
    """Return whether `path` is a folder that contains the token file of at least one split.

    May raise `OSError` if the folder cannot be accessed.
    """
    return any((path / f"{split}.bin").is_file() for split in ALL_SPLITS)


def open_folder(path: Path) -> OpenSource:
    """Open the files of all splits, with their loss masks.

    The dtype comes from meta.json (default: uint16). Raises `UsageError` if a file listed in
    meta.json is missing, if meta.json or a file is damaged, or if meta.json exists but one of the
    mask files is not listed in it. May raise `OSError` if meta.json or the folder cannot be
    accessed.
    """
    meta = read_meta(path)
    files = {split: path / f"{split}.bin" for split in ALL_SPLITS}
    tokens = {
        split: _open(file, meta)
        for split, file in files.items()
        if split in meta.get("tokens", {}) or file.is_file()
    }
    return OpenSource(tokens, meta=meta)


def is_file(path: Path) -> bool:
    """Return whether `path` is a .bin file.

    May raise `OSError` if its folder cannot be accessed.
    """
    return path.suffix == ".bin" and path.is_file()


def open_file(path: Path) -> OpenSource:
    """Open a single .bin file as the "train" split, with its loss mask.

    The dtype comes from the folder's meta.json (default: uint16). Raises `UsageError` if a file is
    missing or damaged, or if meta.json exists but the mask file is not listed in it. May raise
    `OSError` if meta.json or the folder cannot be accessed.
    """
    meta = read_meta(path.parent)
    tokens = _open(path, meta)
    meta.pop("fingerprint", None)  # computed from all splits
    return OpenSource({"train": tokens}, meta=meta)


def mask_path(path: Path) -> Path:
    """Return the path of a token file's loss mask: FILE.mask.bin for FILE.bin."""
    return path.with_suffix(".mask.bin")


def _open(path: Path, meta: dict[str, Any]) -> Tokens:
    if not path.is_file():
        raise UsageError(f"{path} is missing; copy it or prepare the data again")
    dtype = np.dtype(meta.get("dtype", "uint16"))
    size = path.stat().st_size
    n_tokens = meta.get("tokens", {}).get(path.stem, size // dtype.itemsize)
    if size != n_tokens * dtype.itemsize:
        raise UsageError(
            f"{path} has {size} bytes, but {n_tokens} tokens of {dtype.name} take "
            f"{n_tokens * dtype.itemsize}; copy it again or prepare the data again"
        )
    return Tokens(TokenFile(path, dtype, n_tokens), mask=_open_mask(path, n_tokens, meta))


def _open_mask(path: Path, n_tokens: int, meta: dict[str, Any]) -> TokenFile | None:
    """Open a token file's loss mask, or return None if there is no mask."""
    mask = mask_path(path)
    if not (path.stem in meta.get("targets", {}) if meta else mask.is_file()):
        if mask.is_file():
            raise UsageError(
                f'{mask}: meta.json does not list this mask; add "targets": {{"{path.stem}": N}}, '
                "where N is the number of ones in the mask, or remove the file"
            )
        return None
    if not mask.is_file():
        raise UsageError(f"{mask} is missing; copy it or prepare the data again")
    size = mask.stat().st_size
    if size != n_tokens:
        raise UsageError(
            f"{mask} has {size} bytes, but {path.name} has {n_tokens} tokens, and a mask has one "
            "byte per token; copy both files again or prepare the data again"
        )
    return TokenFile(mask, np.dtype(np.uint8), n_tokens)
