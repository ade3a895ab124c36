"""Data sets that jaxgpt makes itself, and the way from text to token files."""

import hashlib
import platform
import sysconfig
import tempfile
import urllib.request
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxgpt.config import UsageError
from jaxgpt.data.prepare.writer import write_dataset
from jaxgpt.data.tokenizers.char import ByteTokenizer, CharTokenizer, Tokenizer
from jaxgpt.data.tokenizers.registry import load_tokenizer

TRAIN_SHARE = 0.9

SHAKESPEARE_URL = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
DOWNLOAD_TIMEOUT = 20  # seconds

# Of the standard library: not installed packages, nor tests (half of it, and repetitive).
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}


def prepare_shakespeare_char(directory: Path, input_file: Path | None) -> list[str]:
    """Prepare Tiny Shakespeare by characters, as nanoGPT does.

    Returns:
        What nanoGPT prints of it.

    Raises:
        UsageError: if the text cannot be downloaded, or is not the known one.
    """
    # Not above: a training run, which imports this file for `prepare_python`, has no use for it.
    from jaxgpt.data.prepare.text import Corpus, write_nanogpt

    with tempfile.TemporaryDirectory() as folder:
        if input_file is None:
            input_file = Path(folder) / "input.txt"
            input_file.write_bytes(_download_shakespeare())
        corpus = Corpus([input_file], None, 1 - TRAIN_SHARE)
        written = write_nanogpt(corpus, directory, None, 1, "Tiny Shakespeare")
    return [
        f"length of dataset in characters: {sum(written.tokens.values()):,}",
        "all the unique characters: "
        + written.tokenizer.decode(range(written.tokenizer.vocab_size)),
        *_summary(written.tokenizer, written.tokens),
    ]


def prepare_text(
    directory: Path,
    inputs: Iterable[Path],
    tokenizer: str,
    *,
    json_key: str = "text",
    workers: int = 1,
    val_share: float | None = None,
    megatron: bool = False,
    end_of_text: str | None = None,
) -> list[str]:
    """Prepare UTF-8 text files or JSON lines, one after the other.

    The last `val_share` of the characters of text files is for validation, as in nanoGPT; of JSON
    lines it is a share of the documents, drawn by a hash of their text.

    Args:
        inputs: files, or folders of them.
        tokenizer: `char`, or what `load_tokenizer` takes.
        json_key: under which a JSON line has its text.
        workers: processes that encode; what is written does not depend on it.
        val_share: by default a tenth of texts, a hundredth of JSON lines.
        megatron: write one pair of Megatron-LM's, NAME_KEY_document.bin and .idx, in place of
            train.bin and val.bin.
        end_of_text: text of the token between documents, where it is not to be guessed.

    Returns:
        Lines that say what was written.

    Raises:
        UsageError: naming file and line or byte of what cannot be read.
    """
    from jaxgpt.data.prepare.reading import input_files
    from jaxgpt.data.prepare.text import Corpus, rates, write_nanogpt

    inputs = list(inputs)
    files, is_json = input_files(inputs)
    encoder = None if tokenizer == "char" else load_tokenizer(tokenizer, end_of_text)
    key = json_key if is_json else None
    if megatron:
        written, lines = _prepare_megatron(directory, files, key, tokenizer, encoder, workers)
    else:
        share = val_share or (0.01 if is_json else 1 - TRAIN_SHARE)
        source = ", ".join(path.name for path in inputs)
        written = write_nanogpt(Corpus(files, key, share), directory, encoder, workers, source)
        lines = _summary(written.tokenizer, written.tokens)
    mark = written.tokenizer.end_of_text
    between = "nothing" if mark is None else f"token {mark}"
    documents = sum(written.documents.values())
    return [*lines, f"documents: {documents:,}, with {between} between them; {rates(written)}"]


def _prepare_megatron(
    directory: Path,
    files: list[Path],
    json_key: str | None,
    name: str,
    tokenizer: Tokenizer | None,
    workers: int,
) -> tuple[Any, list[str]]:
    """Write one pair of Megatron-LM's files; return what was written, and lines about it."""
    from jaxgpt.data.prepare.text import Corpus, write_megatron

    if tokenizer is None or isinstance(tokenizer, CharTokenizer):
        raise UsageError(
            f"--tokenizer {name}: --format megatron keeps no vocabulary of characters; "
            "give byte or a tokenizer"
        )
    prefix = directory / f"{directory.name}_{json_key or 'text'}_document"
    written = write_megatron(Corpus(files, json_key, None), prefix, tokenizer, workers)
    tokenizer.save(directory)
    home = "byte" if isinstance(tokenizer, ByteTokenizer) else directory
    return written, [
        f"vocab size: {tokenizer.vocab_size:,}",
        f"{written.tokens['train']:,} tokens; train on them with data.path={prefix} "
        f"data.tokenizer={home}",
    ]


def prepare_python(directory: Path) -> list[str]:
    """Prepare the source of the standard library, by bytes: text without a download.

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
    tokens = np.frombuffer(content, np.uint8)
    n_train = int(tokens.size * TRAIN_SHARE)
    tokens = {"train": tokens[:n_train], "val": tokens[n_train:]}
    source = f"standard library of Python {platform.python_version()}, {len(files)} files"
    write_dataset(directory, tokens, tokenizer, source)
    return [source, *_summary(tokenizer, {split: len(tokens[split]) for split in tokens})]


def _summary(tokenizer: Tokenizer, tokens: Mapping[str, int]) -> list[str]:
    return [
        f"vocab size: {tokenizer.vocab_size:,}",
        f"train has {tokens['train']:,} tokens",
        f"val has {tokens['val']:,} tokens",
    ]


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
