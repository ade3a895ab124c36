"""Writers for nanoGPT folders with meta.json and for Megatron-LM indexes."""

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from jaxgpt.config import UsageError
from jaxgpt.data.megatron import CODES, HEADER, MAGIC
from jaxgpt.data.nanogpt import mask_path
from jaxgpt.data.source import ALL_SPLITS, SPLITS
from jaxgpt.data.token_file import TokenFile, Tokens, fingerprint
from jaxgpt.data.tokenizers import Tokenizer

SCRATCH = ".preparing-"  # prefix of temporary folders
_LONGEST = 2**31 - 1  # maximum document length in a Megatron-LM .idx file, in tokens


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the dtype of a nanoGPT file: uint16 if it can hold every token ID, else uint32."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


@contextlib.contextmanager
def scratch_folder(directory: Path) -> Iterator[Path]:
    """Yield a temporary folder whose files are moved to `directory` when the block ends.

    `directory` is created if necessary. meta.json is moved last. If the block fails, the temporary
    files are deleted, and so is `directory` if it is new and empty. Raises `OSError` if `directory`
    cannot be written.
    """
    is_new = not directory.exists()
    directory.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(dir=directory, prefix=SCRATCH) as scratch:
            yield Path(scratch)
            for name in sorted(os.listdir(scratch), key=lambda name: (name == "meta.json", name)):
                os.replace(Path(scratch) / name, directory / name)
    except BaseException:
        if is_new and not any(directory.iterdir()):
            directory.rmdir()
        raise


@contextlib.contextmanager
def new_dataset(directory: Path, tokenizer: Tokenizer, source: str) -> Iterator[Path]:
    """Yield a temporary folder for the files SPLIT.bin, which the caller writes.

    The files have the dtype `token_dtype(tokenizer.vocab_size)`. A nonempty split may have a loss
    mask (uint8) at its `mask_path`, with one byte per token. When the block ends, meta.json and the
    tokenizer's file, if any, are added, all files are moved to `directory`, and old splits and
    masks that were not replaced are deleted. `source` describes the origin of the text.
    """
    with scratch_folder(directory) as scratch:
        yield scratch
        dtype = token_dtype(tokenizer.vocab_size)
        splits, targets = {}, {}
        for split in ALL_SPLITS:
            path, mask = scratch / f"{split}.bin", None
            if not path.exists():
                continue
            size = path.stat().st_size // dtype.itemsize
            if mask_path(path).exists():
                mask = TokenFile(mask_path(path), np.dtype(np.uint8), size)
                weights = np.memmap(mask.path, np.uint8, "r")
                targets[split] = int(weights.sum(dtype=np.int64))
            splits[split] = Tokens(TokenFile(path, dtype, size), mask=mask)
        meta = {
            "format": "jaxgpt tokens 1",
            "source": source,
            "tokenizer": tokenizer.to_meta(),
            "vocab_size": tokenizer.vocab_size,
            "dtype": dtype.name,
            "tokens": {split: tokens.size for split, tokens in splits.items()},
            "fingerprint": fingerprint(splits, tokenizer.vocab_size),
        }
        if targets:
            meta["targets"] = targets  # split -> number of tokens that count toward the loss
        tokenizer.save(scratch)
        (scratch / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
    for split in ALL_SPLITS:  # files of the replaced dataset
        path = directory / f"{split}.bin"
        if split not in targets:
            mask_path(path).unlink(missing_ok=True)
        if split not in splits:
            path.unlink(missing_ok=True)


def write_dataset(
    directory: Path, tokens: Mapping[str, np.ndarray], tokenizer: Tokenizer, source: str
) -> None:
    """Write a dataset in nanoGPT's format.

    `tokens` maps each of `SPLITS` to its token IDs, shape (tokens,). The IDs must be in the
    tokenizer's vocabulary. `source` describes the origin of the text. Old splits and masks in
    `directory` are replaced or deleted.
    """
    with new_dataset(directory, tokenizer, source) as scratch:
        for split in SPLITS:
            ids = tokens[split].astype(token_dtype(tokenizer.vocab_size))
            ids.tofile(scratch / f"{split}.bin")


def write_index(path: Path, dtype: np.dtype, lengths: np.ndarray) -> None:
    """Write a Megatron-LM .idx file.

    Args:
        path: path of the new file.
        dtype: type of the token IDs in the .bin file; must be one of `CODES`.
        lengths: number of tokens in each document, int64 of shape (documents,).

    Raises:
        UsageError: if a document has more than 2^31 - 1 tokens.
        OSError: if the file cannot be written.
    """
    if lengths.max(initial=0) > _LONGEST:
        raise UsageError(
            f"{path.stem}: a document has {lengths.max():,} tokens, but Megatron-LM's format "
            f"allows at most {_LONGEST:,}; divide this document"
        )
    code = next(code for code, name in CODES.items() if np.dtype(name) == dtype)
    ends = np.cumsum(lengths, dtype="<i8") * dtype.itemsize
    with open(path, "wb") as file:
        file.write(HEADER.pack(MAGIC, 1, code, lengths.size, lengths.size + 1))
        file.write(lengths.astype("<i4").data)
        file.write(np.concatenate([[0], ends[:-1]]).astype("<i8")[: lengths.size].data)
        file.write(np.arange(lengths.size + 1, dtype="<i8").data)
