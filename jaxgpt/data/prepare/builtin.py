"""Prepare the built-in datasets."""

import hashlib
import http.client
import platform
import sysconfig
import tempfile
import urllib.request
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from jaxgpt.config import UsageError, in_words
from jaxgpt.data.prepare.writer import write_dataset
from jaxgpt.data.tokenizers import ByteTokenizer, Tokenizer

TRAIN_SHARE = 0.9

SHAKESPEARE_URL = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
DOWNLOAD_TIMEOUT = 20  # seconds

# Folders of the standard library to skip. Half of the library is repetitive tests.
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}


def prepare_shakespeare_char(directory: Path, input_file: Path | None) -> list[str]:
    """Prepare character-level Tiny Shakespeare. Return the lines that nanoGPT's prepare.py prints.

    The dataset is written to `directory`. If `input_file` is None, the text is downloaded. The name
    of `input_file` must not end in a JSON or Parquet suffix, with or without .gz. Raises
    `UsageError` if the text cannot be downloaded, and `OSError` if a temporary file or `directory`
    cannot be written.
    """
    # Imported here, because a training run needs only `prepare_python` from this file.
    from jaxgpt.data.prepare.corpus import Corpus, write_nanogpt
    from jaxgpt.data.prepare.json_lines import LineFormat

    with tempfile.TemporaryDirectory() as folder:
        if input_file is None:
            input_file = Path(folder) / "input.txt"
            input_file.write_bytes(_download_shakespeare())
        corpus = Corpus([input_file], LineFormat(None, "char", None), 1 - TRAIN_SHARE)
        tokenizer, tokens, *_ = write_nanogpt(corpus, directory, None, "Tiny Shakespeare")
    return [
        f"length of dataset in characters: {sum(tokens.values()):,}",
        "all the unique characters: " + "".join(tokenizer.characters),
        *summary(tokenizer, tokens),
    ]


def prepare_python(directory: Path) -> list[str]:
    """Prepare the source code of Python's standard library, with one token per byte.

    Tests and IDLE are left out. The dataset is written to `directory`. Nothing is downloaded. Files
    are ordered by a hash of their paths, so that the last tenth, which is used for validation,
    resembles the rest. Returns lines that describe the dataset. Raises `UsageError` if there are no
    source files, and `OSError` if a file cannot be read or if `directory` cannot be written.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    files = [
        path
        for path in library.rglob("*.py")
        if not _NOT_LIBRARY & set(path.relative_to(library).parts)
    ]
    files.sort(key=lambda f: hashlib.sha256(f.relative_to(library).as_posix().encode()).digest())
    content = b"\0".join(f.read_bytes().replace(b"\0", b"") for f in files)
    if not content:
        raise UsageError(f"{library}: contains no Python source; give data.path=DIR instead")
    tokenizer = ByteTokenizer()
    tokens = np.frombuffer(content, np.uint8)
    n_train = int(tokens.size * TRAIN_SHARE)
    tokens = {"train": tokens[:n_train], "val": tokens[n_train:]}
    source = f"standard library of Python {platform.python_version()}, {len(files)} files"
    write_dataset(directory, tokens, tokenizer, source)
    return [source, *summary(tokenizer, {split: len(tokens[split]) for split in tokens})]


def summary(tokenizer: Tokenizer, tokens: Mapping[str, int]) -> list[str]:
    """Return lines with the vocabulary size and the number of tokens in each split."""
    return [
        f"vocab size: {tokenizer.vocab_size:,}",
        *(f"{split} has {size:,} tokens" for split, size in tokens.items()),
    ]


def _download_shakespeare() -> bytes:
    try:
        with urllib.request.urlopen(SHAKESPEARE_URL, timeout=DOWNLOAD_TIMEOUT) as response:
            content = response.read()
        found = hashlib.sha256(content).hexdigest()
        if found != SHAKESPEARE_SHA256:
            raise OSError(f"its SHA-256 is {found}, not {SHAKESPEARE_SHA256}")
    except (OSError, http.client.HTTPException) as error:  # HTTPException: a broken connection
        raise UsageError(
            f"cannot download Tiny Shakespeare ({in_words(error)}); download "
            f"{SHAKESPEARE_URL} elsewhere, and pass it with --input FILE"
        ) from None
    return content
