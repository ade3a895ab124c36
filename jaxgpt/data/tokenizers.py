"""Text to token ids and back. A tokenizer is described by JSON in a data set's meta.json."""

import functools
import hashlib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxgpt.config import UsageError, check_shape, in_words, read_json
from jaxgpt.data.source import read_meta

FILE = "tokenizer.json"
END_OF_TEXT = "<|endoftext|>"
# Tried if no file names the end of text: GPT-2 and GPT-NeoX, Llama 3, Llama 2, Gemma.
_ENDS_OF_TEXT = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")
SHAPES = {  # of `to_meta`, by type
    "char": {"characters": str},
    "huggingface": {"file": str, "sha256": str, "vocab_size": int, "end_of_text": int | None},
}
_CONTEXT = 128  # characters on either side of a split point that are encoded to verify it
# Splits into tokens in many ways: `same_tokens` compares two tokenizers by it.
_PROBE = "Hello, World! It's 1234567 %\n\n  def f(x):\treturn naïve  \u6f22\u5b57 \U0001f642\r\n"
# The patterns that divide text into words (GPT-2, GPT-4, Llama 3, Qwen, DeepSeek) never join a
# letter or digit with the space or newline after it, nor look back.
_SPLIT_POINT = re.compile(r"[^\W_](?=[ \n])")


class Tokenizer:
    """Base class of all tokenizers, each of which defines what is not implemented here."""

    vocab_size: int
    end_of_text: int | None = None  # the token between documents, if there is one

    def encode(self, text: str) -> np.ndarray:
        """Return token ids of `text`, int64, shape (tokens,); names of special tokens are text."""
        raise NotImplementedError

    def encode_batch(self, texts: Sequence[str], parse_special: bool = False) -> list[np.ndarray]:
        """Return the token ids of each text, encoded in parallel if the tokenizer can.

        With `parse_special` the names of special tokens in a text are these tokens.
        """
        return [self.encode(text) for text in texts]

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of token ids."""
        raise NotImplementedError

    def count_bytes(self, tokens: np.ndarray) -> int:
        """Return the number of UTF-8 bytes in the text of token ids; ends of text have none."""
        raise NotImplementedError

    def split_point(self, text: str) -> int:
        """Return the last place at which splitting `text` changes no token; 0 if none is found."""
        return len(text)

    def to_meta(self) -> dict[str, Any]:
        """Return a JSON description from which `tokenizer_from_meta` makes the same tokenizer."""
        raise NotImplementedError

    def save(self, directory: Path) -> None:
        """Write the files that the description refers to into its folder."""


class CharTokenizer(Tokenizer):
    """One token per distinct character, numbered in the order of their code points."""

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
                f"character {text[unknown[0]]!r} (position {unknown[0]}): not among the "
                f"{self.vocab_size} characters of the vocabulary; use the characters of the "
                "training text"
            )
        return tokens

    def decode(self, tokens: Iterable[int]) -> str:
        return "".join(self.characters[t] if t < self.vocab_size else "\ufffd" for t in tokens)

    def count_bytes(self, tokens: np.ndarray) -> int:
        sizes = np.array([len(c.encode(errors="surrogatepass")) for c in self.characters])
        return int(sizes.take(tokens, mode="clip").sum())

    def to_meta(self) -> dict[str, Any]:
        return {"type": "char", "characters": "".join(self.characters)}


class ByteTokenizer(Tokenizer):
    """The 256 bytes of UTF-8. Byte 0, which no text has, separates documents."""

    vocab_size = 256
    end_of_text = 0

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int64)

    def decode(self, tokens: Iterable[int]) -> str:
        values = bytes(min(int(t), 255) for t in tokens)  # above: of a padded vocabulary
        return values.decode(errors="replace").replace("\0", END_OF_TEXT)

    def count_bytes(self, tokens: np.ndarray) -> int:
        return int(np.count_nonzero(tokens))

    def to_meta(self) -> dict[str, Any]:
        return {"type": "byte"}


class HFTokenizer(Tokenizer):
    """A tokenizer.json, parsed by Hugging Face's `tokenizers` package when first needed."""

    def __init__(self, content: bytes, vocab_size: int, end_of_text: int | None):
        self.vocab_size = vocab_size
        self.end_of_text = end_of_text
        self._content = content

    def encode(self, text: str) -> np.ndarray:
        ids = _parse(self._content).encode(text, add_special_tokens=False).ids
        return np.array(ids, np.int64)

    def tokens_around(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the tokens that the file's post-processor puts before and after a text."""
        marks = _parse(self._content).encode("a", add_special_tokens=True)
        kept = [i for i, is_added in enumerate(marks.special_tokens_mask) if not is_added]
        start, stop = (kept[0], kept[-1] + 1) if kept else (len(marks.ids), len(marks.ids))
        return tuple(marks.ids[:start]), tuple(marks.ids[stop:])

    def vocabulary(self) -> dict[str, int]:
        """Return the id of each token by its name."""
        return _parse(self._content).get_vocab(with_added_tokens=True)

    def encode_batch(self, texts: Sequence[str], parse_special: bool = False) -> list[np.ndarray]:
        parsed = _parse(self._content)
        parsed.encode_special_tokens = not parse_special
        try:
            found = parsed.encode_batch_fast(texts, add_special_tokens=False)
        finally:
            parsed.encode_special_tokens = True
        return [np.array(encoding.ids, np.int64) for encoding in found]

    def decode(self, tokens: Iterable[int]) -> str:
        ids = [int(t) for t in tokens]
        return _parse(self._content).decode(ids, skip_special_tokens=False)

    def count_bytes(self, tokens: np.ndarray) -> int:
        documents = np.split(tokens, np.flatnonzero(tokens == self.end_of_text))
        texts = (self.decode(tokens[tokens != self.end_of_text]) for tokens in documents)
        return sum(len(text.encode()) for text in texts)

    def split_point(self, text: str) -> int:
        if _parse(self._content).pre_tokenizer is None:
            return 0  # any token may reach over any place
        tail = max(0, len(text) - 16 * _CONTEXT)
        places = [m.end() for m in _SPLIT_POINT.finditer(text, tail, len(text) - _CONTEXT)]
        if not places:
            return 0
        at = places[-1]
        before, after = text[max(0, at - _CONTEXT) : at], text[at : at + _CONTEXT]
        # They differ for tokenizers that put something before every text.
        parts = np.concatenate([self.encode(before), self.encode(after)])
        return at if np.array_equal(parts, self.encode(before + after)) else 0

    def to_meta(self) -> dict[str, Any]:
        return {
            "type": "huggingface",
            "file": FILE,
            "sha256": hashlib.sha256(self._content).hexdigest(),
            "vocab_size": self.vocab_size,
            "end_of_text": self.end_of_text,
        }

    def save(self, directory: Path) -> None:
        path = directory / FILE
        if not path.exists() or path.read_bytes() != self._content:  # it may be its only copy
            path.write_bytes(self._content)


def same_tokens(one: Tokenizer, other: Tokenizer) -> bool:
    """Return whether two tokenizers make the same tokens, though their files may differ."""
    if one.to_meta() == other.to_meta():
        return True
    if not (isinstance(one, HFTokenizer) and isinstance(other, HFTokenizer)):
        return False
    words = one.vocabulary() == other.vocabulary()
    return words and bool(np.array_equal(one.encode(_PROBE), other.encode(_PROBE)))


def tokenizer_from_meta(meta: dict[str, Any], directory: Path) -> Tokenizer:
    """Return the tokenizer that `to_meta` described and `save` wrote; `UsageError` if changed."""
    kind = meta.get("type")
    try:
        check_shape(meta, SHAPES.get(kind, dict))
        if kind == "char" and not meta["characters"]:
            raise ValueError("characters are none")
    except ValueError as error:
        raise UsageError(
            f"{directory}: its meta.json has a tokenizer whose {error}; prepare the data again"
        ) from None
    match kind:
        case "char":
            return CharTokenizer(meta["characters"])
        case "byte":
            return ByteTokenizer()
        case "huggingface":
            path = directory / meta["file"]
            content = path.read_bytes() if path.is_file() else b""
            if hashlib.sha256(content).hexdigest() != meta["sha256"]:
                raise UsageError(
                    f"{path}: is missing or not the tokenizer that the data was made with (its "
                    f"SHA-256 is {meta['sha256']}); copy it from where the data was prepared"
                )
            return HFTokenizer(content, meta["vocab_size"], meta["end_of_text"])
    raise UsageError(f"tokenizer.type={kind}: in meta.json must be char, byte or huggingface")


def load_tokenizer(path: Path | str, end_of_text: str | None = None) -> Tokenizer:
    """Return the tokenizer that a user names; `UsageError` if there is none.

    Args:
        path: `byte`; the folder of a prepared data set; a tokenizer.json or a folder with it; or
            a folder with GPT-2's encoder.json and vocab.bpe, also named vocab.json and merges.txt.
        end_of_text: the name of the token between documents; by default the `eos_token` of a
            tokenizer_config.json beside the file, or a usual name of such tokens.
    """
    path = Path(path)
    if str(path) == "byte":
        return ByteTokenizer()
    try:
        if end_of_text is None and (path / "meta.json").is_file():
            return tokenizer_from_meta(read_meta(path)["tokenizer"], path)
        file = path / FILE if path.is_dir() else path
        content = file.read_bytes() if file.is_file() else _from_gpt2_files(path)
        ids = _parse(content).get_vocab(with_added_tokens=True)
        config, eos = file.parent / "tokenizer_config.json", end_of_text
        if eos is None and config.is_file():
            eos = read_json(config, {}).get("eos_token")
            eos = eos["content"] if isinstance(eos, dict) else eos
            check_shape(eos, str | None, "eos_token of tokenizer_config.json")
        size = max(ids.values()) + 1
    except UsageError:
        raise
    except Exception as error:  # the package raises nothing narrower
        raise UsageError(
            f"tokenizer {path}: cannot be read ({in_words(error)}); give the path of a {FILE}, a "
            "folder with it or with encoder.json and vocab.bpe, or `byte`"
        ) from None
    if end_of_text is not None and end_of_text not in ids:
        raise UsageError(f"--eos {eos}: is not a token of {path}; give the name of one that is")
    mark = next((ids[name] for name in (eos, *_ENDS_OF_TEXT) if name in ids), None)
    return HFTokenizer(content, size, mark)


def _from_gpt2_files(folder: Path) -> bytes:
    """Return GPT-2's encoder.json and vocab.bpe as a tokenizer.json."""
    package = _import_tokenizers()
    is_openai = (folder / "encoder.json").is_file()
    names = ("encoder.json", "vocab.bpe") if is_openai else ("vocab.json", "merges.txt")
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
            "the package that reads tokenizer.json is not installed: pip install 'jaxgpt[hf]', or "
            "pip install tokenizers"
        ) from None
    return tokenizers


@functools.lru_cache(maxsize=1)
def _parse(content: bytes):
    """Return the `tokenizers` package's object of a tokenizer.json."""
    made = _import_tokenizers().Tokenizer.from_str(content.decode())
    made.encode_special_tokens = True  # the names of special tokens in a text are text
    made.no_truncation()
    made.no_padding()
    return made


def continue_prompt(tokenizer: Tokenizer, prompt: str, tokens: Sequence[int]) -> str:
    """Return a prompt and the text of the tokens that follow it."""
    # Decoded together: some decoders leave out a space before their first token.
    before = tokenizer.encode(prompt).tolist()
    start, whole = tokenizer.decode(before), tokenizer.decode([*before, *tokens])
    if not before or not whole.startswith(start):
        return prompt + tokenizer.decode(tokens)
    return prompt + whole[len(start) :]
