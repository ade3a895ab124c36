"""Text to token ids and back. A tokenizer is described by JSON in a data set's meta.json."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxgpt.config import UsageError


class Tokenizer(Protocol):
    """What every tokenizer has."""

    vocab_size: int
    end_of_text: int | None
    """The token between documents, if there is one."""

    def encode(self, text: str) -> np.ndarray:
        """Return token ids (int64, (tokens,)) of `text`, in which no special token is seen."""

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of token ids."""

    def cut(self, text: str) -> int:
        """Return a place near the end of `text` at which it can be cut, and its parts encoded.

        Their tokens together are those of the whole, however it goes on. 0 if none is found.
        """

    def to_meta(self) -> dict[str, Any]:
        """Return a JSON description from which `from_meta` makes the same tokenizer."""

    def save(self, directory: Path) -> None:
        """Write what the description only names into the folder that the description is in."""


def continued(tokenizer: Tokenizer, prompt: str, tokens: Sequence[int]) -> str:
    """Return a prompt and the text of the tokens that follow it.

    They are decoded together, as some decoders leave out a space before their first token.
    """
    before = tokenizer.encode(prompt).tolist()
    start, whole = tokenizer.decode(before), tokenizer.decode([*before, *tokens])
    if not before or not whole.startswith(start):
        return prompt + tokenizer.decode(tokens)
    return prompt + whole[len(start) :]


class CharTokenizer:
    """One token per distinct character, numbered in the order of their code points."""

    end_of_text = None

    def __init__(self, characters: Sequence[str]):
        self.characters = sorted(characters)
        self.vocab_size = len(self.characters)
        self._codes = np.array([ord(c) for c in self.characters])

    @classmethod
    def of_text(cls, text: str) -> "CharTokenizer":
        return cls(sorted(set(text)))

    def encode(self, text: str) -> np.ndarray:
        """Return token ids of `text`.

        Raises:
            UsageError: if a character is not in the vocabulary.
        """
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
        return "".join(self.characters[t] for t in tokens)

    def cut(self, text: str) -> int:
        return len(text)

    def to_meta(self) -> dict[str, Any]:
        return {"type": "char", "characters": "".join(self.characters)}

    def save(self, directory: Path) -> None:
        """Save nothing: the description is all."""


class ByteTokenizer:
    """The 256 bytes of UTF-8. Byte 0, which no text has, separates documents."""

    vocab_size = 256
    end_of_text = 0

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int64)

    def decode(self, tokens: Iterable[int]) -> str:
        text = bytes(int(t) for t in tokens).decode(errors="replace")
        return text.replace("\0", "<|endoftext|>")

    def cut(self, text: str) -> int:
        return len(text)

    def to_meta(self) -> dict[str, Any]:
        return {"type": "byte"}

    def save(self, directory: Path) -> None:
        """Save nothing: the description is all."""
