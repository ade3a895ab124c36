"""Tokenizers, and their descriptions in meta.json."""

import abc
import functools
import hashlib
import importlib.util
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxgpt.config import UsageError, check_shape, in_words, read_json, shorten
from jaxgpt.data.source import read_meta

TOKENIZER_FILE = "tokenizer.json"
SENTENCEPIECE = "tokenizer.model"
END_OF_TEXT = "<|endoftext|>"
INSTALL_TOKENIZERS = "run pip install 'jaxgpt[hf]'"
# Names of the end-of-text token to try, in this order, if no file defines the name. GPT-2 (and
# GPT-NeoX), Llama 3, Llama 2 and Gemma use these names.
_ENDS_OF_TEXT = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")
SHAPES = {  # structure of the `to_meta` result for each type of tokenizer
    "char": {"characters": str},
    "huggingface": {"file": str, "sha256": str, "vocab_size": int, "end_of_text": int | None},
    "sentencepiece": {"file": str, "sha256": str, "vocab_size": int, "end_of_text": int | None},
}
_CONTEXT = 128  # to verify a split point, this many characters are encoded on each side of it
# `same_tokens` encodes this text. Different tokenizers rarely split it the same way.
_PROBE = "Hello, World! It's 1234567 %\n\n  def f(x):\treturn naïve  \u6f22\u5b57 \U0001f642\r\n"
# The pre-tokenizers of GPT-2, GPT-4, Llama 3, Qwen and DeepSeek never join a letter or digit with a
# following space or newline, and their patterns have no lookbehind.
_SPLIT_POINT = re.compile(r"[^\W_](?=[ \n])")


class Tokenizer(abc.ABC):
    """Base class of all tokenizers."""

    vocab_size: int
    end_of_text: int | None = None  # ID of the token between documents, if there is one

    @abc.abstractmethod
    def encode(self, text: str) -> np.ndarray:
        """Return the token IDs of `text`: int64, shape (tokens,).

        Names of special tokens are encoded as plain text, except user-defined symbols of a
        SentencePiece model. However, an `HFTokenizer` whose model looks up whole words in the
        vocabulary, such as WordPiece, may encode such a name as the special token. A
        `FileTokenizer` may drop unknown characters, map them to an unknown token or raise
        `UsageError`. A `CharTokenizer` raises `UsageError` for an unknown character. All other
        tokenizers raise `UsageError` for a surrogate.
        """

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.vocab_size} tokens>"

    def encode_batch(self, texts: Sequence[str], parse_special: bool = False) -> list[np.ndarray]:
        """Return the token IDs of each string: int64, shape (tokens,).

        A `FileTokenizer` may encode the strings in parallel. If `parse_special` is True, an
        `HFTokenizer` encodes the name of a special token as that token, and a
        `SentencePieceTokenizer` raises `UsageError`. Other tokenizers ignore `parse_special`. The
        strings must not contain surrogates. A `CharTokenizer` raises `UsageError` for an unknown
        character, and a `FileTokenizer` may do so.
        """
        return [self.encode(text) for text in texts]

    @abc.abstractmethod
    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of a sequence of token IDs.

        The end-of-text token is usually decoded to its name or dropped. Invalid UTF-8 becomes
        U+FFFD. IDs beyond the vocabulary become U+FFFD or are dropped. The IDs must not be
        negative.
        """

    @abc.abstractmethod
    def count_bytes(self, tokens: np.ndarray) -> int:
        """Return the number of UTF-8 bytes in the text of `tokens`, excluding end-of-text tokens.

        `tokens` has shape (tokens,), and all IDs must be in the vocabulary. With a `FileTokenizer`,
        invalid UTF-8 counts as U+FFFD, which has 3 bytes.
        """

    def split_point(self, text: str) -> int:
        """Return a position near the end of `text` where splitting should not change the tokens.

        Returns 0 if no such position is found. An `HFTokenizer` checks only the text around the
        position, and raises `UsageError` if it cannot encode this text. `text` must not contain
        surrogates.
        """
        return len(text)

    @abc.abstractmethod
    def to_meta(self) -> dict[str, Any]:
        """Return a JSON description of the tokenizer, for `tokenizer_from_meta`."""

    def save(self, directory: Path) -> None:
        """Write the tokenizer's file, if any, to `directory`.

        An identical file is left unchanged. Raises `OSError` if a file cannot be read or written.
        """
        return  # only a `FileTokenizer` has a file


class CharTokenizer(Tokenizer):
    """Tokenizer with one token per distinct character, numbered in code-point order."""

    def __init__(self, characters: Iterable[str]):
        self.characters = sorted(set(characters))
        self.vocab_size = len(self.characters)
        self._codes = np.array([ord(c) for c in self.characters])

    def encode(self, text: str) -> np.ndarray:
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        tokens = np.minimum(np.searchsorted(self._codes, codes), self.vocab_size - 1)
        unknown = np.flatnonzero(self._codes[tokens] != codes)
        if unknown.size:
            raise UsageError(
                f"character {text[unknown[0]]!r} (position {unknown[0]}): is not in the vocabulary "
                f"of {self.vocab_size} characters; use only characters from the training text"
            )
        return tokens

    def decode(self, tokens: Iterable[int]) -> str:
        return "".join(self.characters[t] if t < self.vocab_size else "\ufffd" for t in tokens)

    def count_bytes(self, tokens: np.ndarray) -> int:
        sizes = np.array([len(c.encode(errors="surrogatepass")) for c in self.characters])
        return int(sizes.take(tokens, mode="clip").sum())

    def to_meta(self) -> dict[str, Any]:
        return {"type": "char", "characters": "".join(self.characters)}


def _not_unicode(text: str) -> UsageError:
    """Return the error for text with a surrogate, which UTF-8 cannot represent."""
    at = next(i for i, c in enumerate(text) if "\ud800" <= c <= "\udfff")
    return UsageError(
        f"character {text[at]!r} (position {at}): is not valid Unicode text; give the text as UTF-8"
    )


def _not_encodable(error: Exception) -> UsageError:
    """Return the error for text that a tokenizer.json cannot encode."""
    return UsageError(
        f"{TOKENIZER_FILE}: cannot encode the text ({error}); add an unknown token to it"
    )


class ByteTokenizer(Tokenizer):
    """Tokenizer with one token per UTF-8 byte. Byte 0 is the token between documents."""

    vocab_size = 256
    end_of_text = 0

    def encode(self, text: str) -> np.ndarray:
        try:
            return np.frombuffer(text.encode(), np.uint8).astype(np.int64)
        except UnicodeEncodeError:
            raise _not_unicode(text) from None

    def decode(self, tokens: Iterable[int]) -> str:
        values = bytes(min(int(t), 255) for t in tokens)  # a padded vocabulary has larger IDs
        return values.decode(errors="replace").replace("\0", END_OF_TEXT)

    def count_bytes(self, tokens: np.ndarray) -> int:
        return int(np.count_nonzero(tokens))

    def to_meta(self) -> dict[str, Any]:
        return {"type": "byte"}


class FileTokenizer(Tokenizer):
    """Tokenizer loaded from a file by a third-party package.

    Methods that need the package raise `UsageError` if it is not installed.
    """

    kind: str  # the type in meta.json
    file: str  # name of the file in a dataset folder or run directory

    def __init__(self, content: bytes, vocab_size: int, end_of_text: int | None):
        self.vocab_size = vocab_size
        self.end_of_text = end_of_text
        self._content = content

    def count_bytes(self, tokens: np.ndarray) -> int:
        documents = np.split(tokens, np.flatnonzero(tokens == self.end_of_text))
        texts = (self.decode(tokens[tokens != self.end_of_text]) for tokens in documents)
        return sum(len(text.encode()) for text in texts)

    def to_meta(self) -> dict[str, Any]:
        return {
            "type": self.kind,
            "file": self.file,
            "sha256": hashlib.sha256(self._content).hexdigest(),
            "vocab_size": self.vocab_size,
            "end_of_text": self.end_of_text,
        }

    def save(self, directory: Path) -> None:
        path = directory / self.file
        # Do not overwrite an identical file, because it may be the only copy.
        if not path.exists() or path.read_bytes() != self._content:
            path.write_bytes(self._content)


class HFTokenizer(FileTokenizer):
    """Tokenizer loaded from a tokenizer.json by the `tokenizers` package."""

    kind, file = "huggingface", TOKENIZER_FILE

    def encode(self, text: str) -> np.ndarray:
        parsed = _parse(self._content)
        try:
            ids = parsed.encode(text, add_special_tokens=False).ids
        except TypeError:  # the text contains a surrogate
            raise _not_unicode(text) from None
        except Exception as error:  # `tokenizers` raises plain `Exception`
            raise _not_encodable(error) from None
        return np.array(ids, np.int64)

    def tokens_around(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the token IDs that the post-processor adds before and after the text.

        The tokenizer must be able to encode the letter "a".
        """
        marks = _parse(self._content).encode("a", add_special_tokens=True)
        kept = [i for i, is_added in enumerate(marks.special_tokens_mask) if not is_added]
        start, stop = (kept[0], kept[-1] + 1) if kept else (len(marks.ids), len(marks.ids))
        return tuple(marks.ids[:start]), tuple(marks.ids[stop:])

    def vocabulary(self) -> dict[str, int]:
        """Return the vocabulary as a mapping from tokens to IDs."""
        return _parse(self._content).get_vocab(with_added_tokens=True)

    def encode_batch(self, texts: Sequence[str], parse_special: bool = False) -> list[np.ndarray]:
        parsed = _parse(self._content)
        parsed.encode_special_tokens = not parse_special
        try:
            found = parsed.encode_batch_fast(texts, add_special_tokens=False)
        except Exception as error:  # `tokenizers` raises plain `Exception`
            raise _not_encodable(error) from None
        finally:
            parsed.encode_special_tokens = True
        return [np.array(encoding.ids, np.int64) for encoding in found]

    def decode(self, tokens: Iterable[int]) -> str:
        ids = [int(t) for t in tokens]
        return _parse(self._content).decode(ids, skip_special_tokens=False)

    def split_point(self, text: str) -> int:
        if _parse(self._content).pre_tokenizer is None:
            return 0  # without a pre-tokenizer, a token may cross any position
        tail = max(0, len(text) - 16 * _CONTEXT)
        places = [m.end() for m in _SPLIT_POINT.finditer(text, tail, len(text) - _CONTEXT)]
        if not places:
            return 0
        at = places[-1]
        before, after = text[max(0, at - _CONTEXT) : at], text[at : at + _CONTEXT]
        # A tokenizer that adds a prefix produces different tokens here.
        parts = np.concatenate([self.encode(before), self.encode(after)])
        return at if np.array_equal(parts, self.encode(before + after)) else 0


class SentencePieceTokenizer(FileTokenizer):
    """Tokenizer loaded from a tokenizer.model by the `sentencepiece` package."""

    kind, file = "sentencepiece", SENTENCEPIECE

    def encode(self, text: str) -> np.ndarray:
        try:
            text.encode()
        except UnicodeEncodeError:  # the package would raise a RuntimeError
            raise _not_unicode(text) from None
        return np.array(_load_model(self._content).encode(text), np.int64)

    def encode_batch(self, texts: Sequence[str], parse_special: bool = False) -> list[np.ndarray]:
        if parse_special:
            raise UsageError(
                f"tokenizer {SENTENCEPIECE}: cannot encode the special tokens of a chat template; "
                f"give the {TOKENIZER_FILE} of this tokenizer"
            )
        threads = int(os.environ.get("RAYON_NUM_THREADS", -1))  # also used by `tokenizers`
        found = _load_model(self._content).encode(list(texts), num_threads=threads)
        return [np.array(ids, np.int64) for ids in found]

    def decode(self, tokens: Iterable[int]) -> str:
        # a padded vocabulary has larger IDs
        return _load_model(self._content).decode([int(t) for t in tokens if t < self.vocab_size])

    def split_point(self, text: str) -> int:
        return 0  # a model may add a space prefix, and a token may cross any position


def same_tokens(one: Tokenizer, other: Tokenizer) -> bool:
    """Return whether two tokenizers appear to produce the same tokens.

    Two `HFTokenizer`s are compared by their vocabularies and the tokens of a test string. For all
    other tokenizers, the results of `to_meta` must be equal, including the end-of-text token.
    """
    if one.to_meta() == other.to_meta():
        return True
    if not (isinstance(one, HFTokenizer) and isinstance(other, HFTokenizer)):
        return False
    words = one.vocabulary() == other.vocabulary()
    return words and bool(np.array_equal(one.encode(_PROBE), other.encode(_PROBE)))


def tokenizer_from_meta(meta: dict[str, Any], directory: Path) -> Tokenizer:
    """Return the tokenizer described by `to_meta` and written to `directory` by `save`.

    Raises:
        UsageError: if the description is invalid, or if the tokenizer's file is missing, unreadable
            or modified.
    """
    kind = meta.get("type")
    try:
        check_shape(meta, SHAPES.get(kind, dict))
        if kind == "char" and not meta["characters"]:
            raise ValueError("characters is empty")
    except ValueError as error:
        raise UsageError(
            f"{directory}: the tokenizer in meta.json is invalid ({error}); prepare the data again"
        ) from None
    match kind:
        case "char":
            return CharTokenizer(meta["characters"])
        case "byte":
            return ByteTokenizer()
        case "huggingface" | "sentencepiece":
            path = directory / meta["file"]
            try:
                content = path.read_bytes() if path.is_file() else b""
            except OSError as error:
                raise UsageError(f"{path}: cannot be read ({in_words(error)})") from None
            if hashlib.sha256(content).hexdigest() != meta["sha256"]:
                raise UsageError(
                    f"{path}: is missing, or is not the tokenizer the data was prepared with "
                    f"(SHA-256 {meta['sha256']}); copy the file from the prepared dataset"
                )
            made = HFTokenizer if kind == "huggingface" else SentencePieceTokenizer
            return made(content, meta["vocab_size"], meta["end_of_text"])
    raise UsageError(
        f"tokenizer.type={kind} in meta.json: must be one of byte, {', '.join(SHAPES)}"
    )


def load_tokenizer(
    path: Path | str, end_of_text: str | None = None, names: str = "`byte`"
) -> Tokenizer:
    """Load the tokenizer at a path given by the user.

    Args:
        path: `byte`; the folder of a prepared dataset; a tokenizer.json, a SentencePiece .model or
            a folder that contains tokenizer.json or tokenizer.model; or a folder with GPT-2's
            encoder.json and vocab.bpe (or vocab.json and merges.txt). If a folder has several of
            these, the first one in this list is used. If `end_of_text` is set, meta.json is
            ignored.
        end_of_text: the name of the token between documents. By default, a prepared dataset or a
            SentencePiece model defines this token. For other tokenizers, the default is the
            `eos_token` from tokenizer_config.json in the same folder or, failing that, a commonly
            used end-of-text token. If none of these tokens is in the vocabulary, the tokenizer has
            no end-of-text token. `end_of_text` is ignored for `byte`.
        names: the names that the user may give instead of a path, for the error message.

    Raises:
        UsageError: if the tokenizer is missing or invalid, or if `end_of_text` is not in its
            vocabulary.
    """
    path = Path(path)
    if str(path) == "byte":
        return ByteTokenizer()
    try:
        if end_of_text is None and (path / "meta.json").is_file():
            return tokenizer_from_meta(read_meta(path)["tokenizer"], path)
        file = path / TOKENIZER_FILE if path.is_dir() else path
        model = path / SENTENCEPIECE if path.is_dir() else path
        if model.suffix == ".model" and model.is_file() and not (path / TOKENIZER_FILE).is_file():
            return _from_sentencepiece(model, end_of_text)
        content = file.read_bytes() if file.is_file() else _from_gpt2_files(path)
        ids = _parse(content).get_vocab(with_added_tokens=True)
        config, eos = file.parent / "tokenizer_config.json", end_of_text
        if eos is None and config.is_file():
            value = read_json(config, {}).get("eos_token")
            eos = special_token(value)
            if eos is None and value is not None:
                raise ValueError(f"eos_token of tokenizer_config.json is {shorten(repr(value))}")
        size = max(ids.values()) + 1
    except UsageError:
        raise
    except Exception as error:  # `tokenizers` raises plain `Exception`
        package = "" if importlib.util.find_spec("tokenizers") else f", and {INSTALL_TOKENIZERS}"
        raise UsageError(
            f"tokenizer {path}: cannot be read ({in_words(error)}); give {names}, a "
            f"{TOKENIZER_FILE}, a {SENTENCEPIECE}, or a folder that contains one of these or "
            f"GPT-2's encoder.json and vocab.bpe{package}"
        ) from None
    if end_of_text is not None and end_of_text not in ids:
        raise UsageError(f"--eos {eos}: is not a token of {path}; give the name of a special token")
    mark = next((ids[name] for name in (eos, *_ENDS_OF_TEXT) if name in ids), None)
    return HFTokenizer(content, size, mark)


def special_token(value: Any) -> str | None:
    """Return the text of a special token in tokenizer_config.json.

    `value` is the text, or a dictionary with the text as its `content`. Return None if it is
    neither, for example if the tokenizer has no such token.
    """
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _from_sentencepiece(path: Path, end_of_text: str | None) -> SentencePieceTokenizer:
    content = path.read_bytes()
    if re.match(rb"[A-Za-z0-9+/=]+ \d+\n", content):
        raise UsageError(
            f"tokenizer {path}: is a file for tiktoken, not for SentencePiece; give the model's "
            f"{TOKENIZER_FILE}"
        )
    loaded = _load_model(content)
    mark = loaded.eos_id() if end_of_text is None else loaded.piece_to_id(end_of_text)
    if end_of_text is not None and loaded.id_to_piece(mark) != end_of_text:
        raise UsageError(f"--eos {end_of_text}: is not a token of {path}; give the name of a piece")
    return SentencePieceTokenizer(content, loaded.get_piece_size(), mark if mark >= 0 else None)


@functools.lru_cache(maxsize=1)
def _load_model(content: bytes):
    """Load a SentencePiece model from the content of its file."""
    try:
        import sentencepiece
    except ImportError:
        raise UsageError(
            f"the `sentencepiece` package, which reads {SENTENCEPIECE}, is not installed; run "
            "pip install 'jaxgpt[sentencepiece]' or pip install sentencepiece"
        ) from None
    return sentencepiece.SentencePieceProcessor(model_proto=content)


def _from_gpt2_files(folder: Path) -> bytes:
    """Convert GPT-2's vocabulary files to the content of a tokenizer.json.

    If the files are missing, raises `FileNotFoundError` with the reason as its message.
    """
    is_openai = (folder / "encoder.json").is_file()
    names = ("encoder.json", "vocab.bpe") if is_openai else ("vocab.json", "merges.txt")
    missing = [name for name in names if not (folder / name).is_file()]
    if not folder.is_dir():
        raise FileNotFoundError("no such file or folder")
    if missing:
        one = f"{missing[0]} is missing"
        raise FileNotFoundError(one if len(missing) < len(names) else "the folder has no tokenizer")
    package = _import_tokenizers()
    made = package.Tokenizer(package.models.BPE.from_file(*(str(folder / name) for name in names)))
    made.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = package.decoders.ByteLevel()
    if made.token_to_id(END_OF_TEXT) is not None:
        made.add_special_tokens([END_OF_TEXT])
    return made.to_str().encode()


def _import_tokenizers():
    try:
        import tokenizers
    except ImportError:
        raise UsageError(
            "the `tokenizers` package is not installed; it reads tokenizer.json, and GPT-2's "
            f"encoder.json and vocab.bpe; {INSTALL_TOKENIZERS} or pip install tokenizers"
        ) from None
    return tokenizers


@functools.lru_cache(maxsize=1)
def _parse(content: bytes):
    """Parse the content of a tokenizer.json with the `tokenizers` package."""
    made = _import_tokenizers().Tokenizer.from_str(content.decode())
    made.encode_special_tokens = True  # encode the names of special tokens as plain text
    made.no_truncation()
    made.no_padding()
    return made


def prompt_tokens(tokenizer: Tokenizer, prompt: str) -> Sequence[int] | np.ndarray:
    """Return the token IDs of a prompt, shape (tokens,).

    A prompt that is empty or encodes to no tokens is replaced with the end-of-text token, or with
    token 0 if the tokenizer has no end-of-text token.
    """
    tokens = tokenizer.encode(prompt) if prompt else ()
    return tokens if len(tokens) else [tokenizer.end_of_text or 0]


def continue_prompt(tokenizer: Tokenizer, prompt: str, tokens: Sequence[int]) -> str:
    """Return `prompt` followed by the text of `tokens`."""
    # Decode both together, because some decoders drop the space before the first token.
    before = tokenizer.encode(prompt).tolist()
    start, whole = tokenizer.decode(before), tokenizer.decode([*before, *tokens])
    if not before or not whole.startswith(start):
        return prompt + tokenizer.decode(tokens)
    return prompt + whole[len(start) :]
