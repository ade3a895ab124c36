"""Data sets that jaxgpt makes itself, and the way from text to token files."""

import hashlib
import platform
import sysconfig
import urllib.request
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from jaxgpt.config import UsageError
from jaxgpt.data.publishing import write_dataset
from jaxgpt.data.tokenizer import ByteTokenizer, CharTokenizer, Tokenizer

TRAIN_SHARE = 0.9

SHAKESPEARE_URL = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
DOWNLOAD_TIMEOUT = 20  # seconds

# Of the standard library: not installed packages, nor tests (half of it, and repetitive).
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}


def prepare_shakespeare_char(directory: Path, input_file: Path | None) -> list[str]:
    """Tiny Shakespeare by characters, as nanoGPT prepares it.

    Returns:
        What nanoGPT prints of it.

    Raises:
        UsageError: if the text cannot be downloaded, or is not the known one.
    """
    if input_file is not None:
        text = _read_text([input_file])
    else:
        text = _download_shakespeare().decode()
    if not text:
        raise UsageError(f"--input {input_file}: no text in it")
    tokenizer = CharTokenizer.of_text(text)
    tokens = _split_and_write(directory, text, tokenizer, "Tiny Shakespeare")
    return [
        f"length of dataset in characters: {len(text):,}",
        "all the unique characters: " + "".join(tokenizer.characters),
        f"vocab size: {tokenizer.vocab_size:,}",
        f"train has {tokens['train'].size:,} tokens",
        f"val has {tokens['val'].size:,} tokens",
    ]


def prepare_text(directory: Path, input_files: Iterable[Path], tokenizer_name: str) -> list[str]:
    """Any UTF-8 text files, one after the other, by characters or bytes.

    Returns:
        Lines that say what was written.
    """
    files = list(input_files)
    text = _read_text(files)
    if not text:
        raise UsageError(f"--input {' '.join(map(str, files))}: no text in it")
    tokenizer = CharTokenizer.of_text(text) if tokenizer_name == "char" else ByteTokenizer()
    tokens = _split_and_write(directory, text, tokenizer, ", ".join(f.name for f in files))
    return _summary(tokenizer, tokens)


def prepare_python(directory: Path) -> list[str]:
    """The source of the standard library that is running, by bytes: text without a download.

    Files follow one another in an order by hash, so that the last tenth, the validation split,
    is like the rest; byte 0 ends each.

    Returns:
        Lines that say what was written.
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
        raise UsageError(f"{library}: holds no Python source; give data.path=DIR instead")
    tokenizer = ByteTokenizer()
    tokens = _split(np.frombuffer(content, np.uint8))
    source = f"standard library of Python {platform.python_version()}, {len(files)} files"
    write_dataset(directory, tokens, tokenizer, source)
    return [source, *_summary(tokenizer, tokens)]


def _summary(tokenizer: Tokenizer, tokens: dict[str, np.ndarray]) -> list[str]:
    return [
        f"vocab size: {tokenizer.vocab_size:,}",
        f"train has {tokens['train'].size:,} tokens",
        f"val has {tokens['val'].size:,} tokens",
    ]


def _split(tokens: np.ndarray) -> dict[str, np.ndarray]:
    n_train = int(len(tokens) * TRAIN_SHARE)
    return {"train": tokens[:n_train], "val": tokens[n_train:]}


def _split_and_write(
    directory: Path, text: str, tokenizer: Tokenizer, source: str
) -> dict[str, np.ndarray]:
    tokens = _split(tokenizer.encode(text))
    if tokenizer.vocab_size < 2 or any(split.size < 2 for split in tokens.values()):
        raise UsageError(
            f"--input: {len(text)} characters of {tokenizer.vocab_size} kinds are too "
            "few to train on and validate with; give more text"
        )
    write_dataset(directory, tokens, tokenizer, source)
    return tokens


def _read_text(files: Iterable[Path]) -> str:
    parts = []
    for file in files:
        try:
            parts.append(file.read_bytes().decode())
        except OSError as error:
            raise UsageError(f"--input {file}: cannot be read ({error.strerror})") from None
        except UnicodeDecodeError as error:
            raise UsageError(f"--input {file}: is not UTF-8 text ({error})") from None
    return "".join(parts)


def _download_shakespeare() -> bytes:
    try:
        with urllib.request.urlopen(SHAKESPEARE_URL, timeout=DOWNLOAD_TIMEOUT) as response:
            content = response.read()
    except OSError as error:
        raise UsageError(
            f"cannot download Tiny Shakespeare ({error}); get {SHAKESPEARE_URL} by other means "
            "and pass it with --input FILE"
        ) from None
    found = hashlib.sha256(content).hexdigest()
    if found != SHAKESPEARE_SHA256:
        raise UsageError(
            f"what came from {SHAKESPEARE_URL} has SHA-256 {found}, not {SHAKESPEARE_SHA256}; "
            "pass a file that you trust with --input FILE"
        )
    return content
