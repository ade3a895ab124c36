"""Writing a data set: a folder with train.bin, val.bin and meta.json that appears whole."""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from jaxgpt.data.source import SPLITS
from jaxgpt.data.token_file import TokenFile, Tokens, fingerprint
from jaxgpt.data.tokenizers.char import Tokenizer


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the smallest type of nanoGPT's files that holds every id."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


@contextlib.contextmanager
def new_dataset(directory: Path, tokenizer: Tokenizer, source: str) -> Iterator[Path]:
    """A folder to write train.bin and val.bin into, of `token_dtype(tokenizer.vocab_size)`.

    When the block ends it gets its meta.json and becomes `directory`; if the block fails it is
    removed. Of a directory that is there only these files are replaced, the description last.

    Args:
        source: where the text came from, for people.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    # Inside, where it can be: the parent may be another's, or another file system.
    home = directory if directory.is_dir() else directory.parent
    scratch = Path(tempfile.mkdtemp(dir=home, prefix=f".{directory.name}-"))
    try:
        yield scratch
        dtype = token_dtype(tokenizer.vocab_size)
        splits = {
            split: Tokens([TokenFile(path, dtype, path.stat().st_size // dtype.itemsize)])
            for split, path in ((split, scratch / f"{split}.bin") for split in SPLITS)
        }
        meta = {
            "format": "jaxgpt tokens 1",
            "source": source,
            "tokenizer": tokenizer.to_meta(),
            "vocab_size": tokenizer.vocab_size,
            "dtype": dtype.name,
            "tokens": {split: tokens.size for split, tokens in splits.items()},
            "fingerprint": fingerprint(splits, tokenizer.vocab_size),
        }
        tokenizer.save(scratch)
        (scratch / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
        scratch.chmod(0o755)
        if directory.is_dir():
            for path in sorted(scratch.iterdir(), key=lambda path: path.name == "meta.json"):
                os.replace(path, directory / path.name)
        else:
            scratch.rename(directory)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def write_dataset(
    directory: Path, tokens: Mapping[str, np.ndarray], tokenizer: Tokenizer, source: str
) -> None:
    """Write a data set that fits in memory.

    Args:
        tokens: split -> token ids, of any integer dtype.
    """
    dtype = token_dtype(tokenizer.vocab_size)
    with new_dataset(directory, tokenizer, source) as scratch:
        for split in SPLITS:
            tokens[split].astype(dtype).tofile(scratch / f"{split}.bin")
