"""Byte-pair and other subword tokenizers, by the `tokenizers` package of Hugging Face.

All of a tokenizer is one tokenizer.json, which a data set keeps a copy of. GPT-2's encoder.json
and vocab.bpe are put into that form.
"""

import functools
import hashlib
import importlib.util
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from jaxgpt.config import UsageError

FILE = "tokenizer.json"
END_OF_TEXT = "<|endoftext|>"
# Where nothing names the end of text: the names of GPT-2 and GPT-NeoX, Llama 3, Llama 2, Gemma.
_ENDS_OF_TEXT = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")
_GPT2_FILES = (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt"))
_PIECE = 1 << 16  # characters that are encoded at once
_CONTEXT = 128  # characters on either side of a cut with which it is tried
_TRIES = 8  # places that are tried
# A cut is made before the space or newline after a letter or digit: the patterns that part text
# into words (those of GPT-2, GPT-4, Llama 3, Qwen, DeepSeek) never join the two, nor look back.
_CUT = re.compile(r"[^\W_](?=[ \n])")


class HFTokenizer:
    """A tokenizer.json."""

    def __init__(self, content: bytes, vocab_size: int, end_of_text: int | None):
        """
        Args:
            content: of the tokenizer.json; it is understood when it is first needed.
            vocab_size: one more than its largest token id.
            end_of_text: the token between documents.
        """
        self.vocab_size = vocab_size
        self.end_of_text = end_of_text
        self._content = content

    @classmethod
    def from_meta(cls, meta: dict[str, Any], directory: Path) -> "HFTokenizer":
        """Return the tokenizer of a description, from the copy of its file beside it.

        Raises:
            UsageError: if the file is missing, or not the one that was described, or if the
                `tokenizers` package is not installed.
        """
        _check_installed()
        path = directory / meta["file"]
        content = _read(path)
        if (found := hashlib.sha256(content).hexdigest()) != meta["sha256"]:
            raise UsageError(
                f"{path}: has SHA-256 {found}, but the data was made with {meta['sha256']}; "
                "copy the tokenizer from where the data was prepared"
            )
        return cls(content, meta["vocab_size"], meta["end_of_text"])

    def to_meta(self) -> dict[str, Any]:
        return {
            "type": "huggingface",
            "file": FILE,
            "sha256": hashlib.sha256(self._content).hexdigest(),
            "vocab_size": self.vocab_size,
            "end_of_text": self.end_of_text,
        }

    def save(self, directory: Path) -> None:
        (directory / FILE).write_bytes(self._content)

    def __reduce__(self):
        # Of the package's object a copy would lack what is not in the file.
        return HFTokenizer, (self._content, self.vocab_size, self.end_of_text)

    @functools.cached_property
    def _tokenizer(self):
        return _load(self._content)

    def encode(self, text: str) -> np.ndarray:
        """Return token ids of `text`: int64, shape (tokens,).

        The names of special tokens are text like any other, as in tiktoken's `encode_ordinary`.
        """
        parts = []
        # A piece at a time: what the package keeps of each token is a hundred times its id.
        start = 0
        while start < len(text):
            end = start + _PIECE
            while end < len(text) and not (size := self.cut(text[start:end])):
                end += end - start
            end = start + size if end < len(text) else len(text)
            parts.append(self._encode(text[start:end]))
            start = end
        return np.concatenate(parts, dtype=np.int64) if parts else np.empty(0, np.int64)

    def _encode(self, text: str) -> np.ndarray:
        """Return the ids of a text, all at once."""
        found = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return np.array(found[0].ids, np.int64)

    def decode(self, tokens: Iterable[int]) -> str:
        return self._tokenizer.decode([int(t) for t in tokens], skip_special_tokens=False)

    def cut(self, text: str) -> int:
        if self._tokenizer.pre_tokenizer is None:
            return 0  # any token may reach over any place
        tail = max(0, len(text) - 16 * _CONTEXT)
        for match in list(_CUT.finditer(text, tail, len(text) - _CONTEXT))[: -_TRIES - 1 : -1]:
            at = match.end()
            before, after = text[max(0, at - _CONTEXT) : at], text[at : at + _CONTEXT]
            # Not so for tokenizers that put something before every text that they are given.
            parts = np.concatenate([self._encode(before), self._encode(after)])
            if np.array_equal(parts, self._encode(before + after)):
                return at
        return 0


def read_tokenizer(path: Path, end_of_text: str | None = None) -> HFTokenizer:
    """Return the tokenizer in files.

    Args:
        path: a tokenizer.json or the folder with it; or a folder with GPT-2's encoder.json and
            vocab.bpe, also under the names vocab.json and merges.txt.
        end_of_text: the text of the token between documents; else it is the `eos_token` of a
            tokenizer_config.json beside the file, or what such tokens are mostly called.

    Raises:
        UsageError: if there is no tokenizer, or it has no such token.
    """
    _check_installed()
    content = _content(path)
    try:
        ids = _load(content).get_vocab(with_added_tokens=True)
    except Exception as error:  # the package raises nothing narrower
        raise UsageError(
            f"tokenizer {path}: is not a {FILE} ({error}); give the path of one, a folder with it "
            "or with encoder.json and vocab.bpe, or `byte`"
        ) from None
    folder = path if path.is_dir() else path.parent
    named = end_of_text
    if named is None:
        named = _configured(folder / "tokenizer_config.json")
    if end_of_text is not None and named not in ids:
        raise UsageError(f"--eos {named}: is not a token of {path}; give the name of one that is")
    known = [ids[name] for name in (named, *_ENDS_OF_TEXT) if name in ids]
    return HFTokenizer(content, max(ids.values()) + 1, known[0] if known else None)


def _content(path: Path) -> bytes:
    """Return the tokenizer.json at `path`, or made of GPT-2's files there."""
    if path.is_file():
        return _read(path)
    if (path / FILE).is_file():
        return _read(path / FILE)
    for vocabulary, merges in ((path / v, path / m) for v, m in _GPT2_FILES):
        if vocabulary.is_file() and merges.is_file():
            return _of_gpt2(vocabulary, merges)
    raise UsageError(
        f"tokenizer {path}: there is no {FILE}, nor encoder.json and vocab.bpe; give a folder with "
        "them, the path of a tokenizer.json, or `byte`"
    )


def _of_gpt2(vocabulary: Path, merges: Path) -> bytes:
    """Return GPT-2's files as a tokenizer.json, the same bytes with every version of it."""
    try:
        ids = json.loads(_read(vocabulary))
        lines = _read(merges).decode().split("\n")
    except ValueError as error:
        raise UsageError(f"{vocabulary}, {merges}: are not files like GPT-2's ({error})") from None
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": ids[t], "content": t, "special": True} | special for t in ids if t == END_OF_TEXT
    ]
    whole = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level | {"use_regex": True},
        "post_processor": None,
        "decoder": byte_level | {"use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": ids,
            "merges": [line for line in lines if line and not line.startswith("#version")],
        },
    }
    return json.dumps(whole, ensure_ascii=False).encode()


@functools.lru_cache(maxsize=1)  # copies of one tokenizer arrive with every piece of text
def _load(content: bytes):
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # one text at a time has no use of it
    from tokenizers import Tokenizer as Package

    package = Package.from_str(content.decode())
    package.encode_special_tokens = True  # their names in a text are text
    package.no_truncation()
    package.no_padding()
    return package


def _configured(path: Path) -> str | None:
    """Return the `eos_token` of a tokenizer_config.json, if there is one."""
    if not path.is_file():
        return None
    try:
        token = json.loads(path.read_text()).get("eos_token")
    except (ValueError, AttributeError) as error:
        raise UsageError(f"{path}: is not a tokenizer's configuration ({error})") from None
    return token["content"] if isinstance(token, dict) else token


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(
            f"{path}: the tokenizer cannot be read ({error.strerror}); copy it from where the data "
            "was prepared"
        ) from None


def _check_installed() -> None:
    if importlib.util.find_spec("tokenizers") is None:
        raise UsageError(
            "the package that reads tokenizer.json is not installed: pip install 'jaxgpt[hf]', or "
            "pip install tokenizers"
        )
