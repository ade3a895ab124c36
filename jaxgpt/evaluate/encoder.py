"""Tokenization of texts for lm_eval, with the special tokens that transformers adds."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxgpt.convert.safetensors import read_json
from jaxgpt.data.tokenizers import HFTokenizer, Tokenizer

# Tokenizer settings saved with weights from transformers. The first file takes precedence.
SETTINGS = ("tokenizer_config.json", "special_tokens_map.json")


class Encoder(NamedTuple):
    """A tokenizer and the special tokens around each text."""

    tokenizer: Tokenizer
    prefix: int
    """ID of the token before a text without context: BOS, EOS, end of text or 0, in this order."""
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token IDs of a text."""
        tokens = self.tokenizer.encode(text).tolist()
        return [*self.before, *tokens, *self.after] if add_special_tokens else tokens


def encoder_of(folder: Path, tokenizer: Tokenizer) -> Encoder:
    """Return the encoder for the weights in a folder.

    For weights from transformers, texts are encoded as transformers 5 does by default. If the
    tokenizer settings contain add_bos_token or add_eos_token, these decide whether BOS and EOS are
    added. Otherwise, tokenizer.json decides. For other weights, no special tokens are added.
    """
    end = tokenizer.end_of_text
    plain = Encoder(tokenizer, end or 0)
    found = [read_json(folder / name) for name in SETTINGS if (folder / name).is_file()]
    if not found or not isinstance(tokenizer, HFTokenizer):
        return plain
    settings = {key: value for one in reversed(found) for key, value in one.items()}
    bos, eos = (_token(settings.get(key), tokenizer) for key in ("bos_token", "eos_token"))
    before, after = _added(settings, tokenizer, bos, eos)
    prefixes = (token for token in (bos, eos, end) if token is not None)
    return Encoder(tokenizer, next(prefixes, 0), before, after)


def _token(given: Any, tokenizer: HFTokenizer) -> int | None:
    """Return the ID of a token, given as its name or as an object with its name."""
    name = given.get("content") if isinstance(given, dict) else given
    return tokenizer.vocabulary().get(name) if isinstance(name, str) else None


def _added(
    settings: Mapping[str, Any], tokenizer: HFTokenizer, bos: int | None, eos: int | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the IDs of the tokens that are added before and after every text."""
    flags = {"add_bos_token": bos, "add_eos_token": eos}
    if not flags.keys() & settings.keys():
        return tokenizer.tokens_around()
    before, after = (
        (token,) if settings.get(flag) and token is not None else ()
        for flag, token in flags.items()
    )
    return before, after
