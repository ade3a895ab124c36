"""Prepare the built-in datasets, and datasets from the user's text."""

import hashlib
import http.client
import platform
import re
import sysconfig
import tempfile
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path

import numpy as np

from jaxgpt.config import UsageError, in_words
from jaxgpt.data.prepare.writer import write_dataset
from jaxgpt.data.tokenizers import ByteTokenizer, CharTokenizer, Tokenizer, load_tokenizer

TRAIN_SHARE = 0.9

SHAKESPEARE_URL = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
DOWNLOAD_TIMEOUT = 20  # seconds
CHAR_TOKENIZER = (
    "tokenizer: char, one token per character; --tokenizer selects another, such as byte, a "
    "tokenizer.json or a folder with encoder.json and vocab.bpe"
)

# Folders of the standard library to skip. Half of the library is repetitive tests.
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}


def prepare_shakespeare_char(directory: Path, input_file: Path | None) -> list[str]:
    """Prepare character-level Tiny Shakespeare. Return the lines that nanoGPT's prepare.py prints.

    The dataset is written to `directory`. If `input_file` is None, the text is downloaded. The name
    of `input_file` must not end in a JSON or Parquet suffix, with or without .gz. Raises
    `UsageError` if the text cannot be downloaded or read, is not in a regular file, is too short,
    or has only one distinct character. Raises `OSError` if a temporary file or `directory` cannot
    be written.
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
        *_summary(tokenizer, tokens),
    ]


def prepare_text(
    directory: Path,
    inputs: Sequence[Path],
    tokenizer: str | Tokenizer,
    *,
    json_key: str | None = None,
    chat_template: Path | None = None,
    val_share: float | None = None,
    split: str | None = None,
    megatron: bool = False,
    end_of_text: str | None = None,
    pool: Executor | None = None,
) -> list[str]:
    """Prepare text, JSON lines and Parquet files. Return lines that describe the dataset.

    Unless `split` or `megatron` is set, the data is split into a training set and a validation set.
    If all files are text, the last `val_share` of the characters is used for validation, as in
    nanoGPT. Otherwise, a hash of each document's text selects the documents for validation. If
    there are too few documents, the end of the token sequence is used instead.

    Args:
        directory: folder to write the dataset to. Existing data of the same format and name is
            replaced.
        inputs: one or more files, or folders that contain them.
        tokenizer: `char`, a path that `load_tokenizer` accepts, or a tokenizer.
        json_key: keys that hold the text in JSON lines and Parquet rows; see `LineFormat.key`.
        chat_template: file with a chat template. If `tokenizer` is a path, the default is the
            tokenizer's template.
        val_share: share of the data to use for validation; if 0 or None, the default in `corpus.py`
            is used. Megatron data is not split.
        split: `train`, `val` or `test`; all of the text goes to this split. By default, the text is
            divided into training and validation data.
        megatron: write NAME_KEY_document.bin and .idx instead of a folder with meta.json.
        end_of_text: name of the end-of-text token, if `tokenizer` is a path; see `load_tokenizer`.
        pool: worker processes that tokenize files together with this process.

    Raises:
        UsageError: if an option or the input is invalid, or if a required package is missing or too
            old.
        OSError: if the tokenizer's tokenizer_config.json or chat template cannot be read, or if
            `directory` cannot be written.
    """
    from jaxgpt.data.prepare.corpus import Corpus, write_megatron, write_nanogpt
    from jaxgpt.data.prepare.files import find_files, ignored_files
    from jaxgpt.data.prepare.json_lines import LineFormat

    files = find_files(inputs)
    name, encoder = str(tokenizer), tokenizer
    if isinstance(tokenizer, str):
        names = "`byte`" if megatron else "`char`, `byte`"
        encoder = None if tokenizer == "char" else load_tokenizer(tokenizer, end_of_text, names)
    corpus = Corpus(files, LineFormat(json_key, name, chat_template), val_share, split)
    if chat_template and corpus.is_text:
        raise UsageError(
            f"--chat-template {chat_template}: is only for JSON lines with messages; leave it out"
        )
    if megatron:
        if encoder is None or isinstance(encoder, CharTokenizer):
            raise UsageError(
                f"--tokenizer {tokenizer}: --format megatron cannot store a character vocabulary; "
                "use byte or a tokenizer.json"
            )
        key = (not corpus.is_text and json_key) or "text"
        prefix = directory / f"{megatron_name(directory)}_{key}_document"
        made = write_megatron(corpus, prefix, encoder, pool)
        encoder.save(directory)
        home = "byte" if isinstance(encoder, ByteTokenizer) else directory
        said = [
            f"vocab size: {encoder.vocab_size:,}",
            f"{made.tokens['train']:,} tokens; train on them with data.path={prefix} "
            f"data.tokenizer={home}",
        ]
    else:
        source = ", ".join(path.name for path in inputs)
        made = write_nanogpt(corpus, directory, encoder, source, pool)
        said = _summary(made.tokenizer, made.tokens)
        if tokenizer == "char":
            said.append(CHAR_TOKENIZER)
        said += [
            f"{split} has {targets:,} targets that count toward the loss"
            for split, targets in made.targets.items()
        ]
        said.append(made.division)
    mark = made.tokenizer.end_of_text
    separated = "joined without a separator token" if mark is None else f"separated by token {mark}"
    said.append(f"documents: {made.documents:,}" + f", {separated}" * (made.documents > 1))
    if megatron and made.documents == 1:
        said.append(
            "a single document cannot be split for validation in this format; give several "
            "documents, or use --format nanogpt"
        )
    if ignored := ignored_files(inputs):
        said.append(
            f"ignored {len(ignored):,} file{'s' * (len(ignored) > 1)} with an unknown suffix, such "
            f"as {ignored[0]}"
        )
    return said


def megatron_name(directory: Path) -> str:
    """Return a folder's name without the suffix `_KEY_document`, where KEY has no underscore."""
    return re.sub(r"_[^_]+_document$", "", directory.name)


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
    return [source, *_summary(tokenizer, {split: len(tokens[split]) for split in tokens})]


def _summary(tokenizer: Tokenizer, tokens: Mapping[str, int]) -> list[str]:
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
