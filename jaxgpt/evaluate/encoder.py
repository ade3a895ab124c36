"""Tokenization for lm_eval, with the special tokens that transformers adds."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxgpt.convert.safetensors import read_json
from jaxgpt.data.tokenizers import HFTokenizer, Tokenizer

# transformers saves a tokenizer's settings in these files, next to the weights. If a setting is in
# both files, the first file takes precedence.
SETTINGS = ("tokenizer_config.json", "special_tokens_map.json")


class Encoder(NamedTuple):
    """A tokenizer, and the special tokens to add before and after its tokens."""

    tokenizer: Tokenizer
    prefix: int
    """Token ID that replaces an empty context: BOS, else EOS, else end-of-text, else 0."""
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token IDs of a text, by default with special tokens.

        Raises whatever `Tokenizer.encode` raises.
        """
        tokens = self.tokenizer.encode(text).tolist()
        return [*self.before, *tokens, *self.after] if add_special_tokens else tokens


def encoder_of(folder: Path, tokenizer: Tokenizer) -> Encoder:
    """Return the encoder for the weights in a folder.

    If the folder has one of the `SETTINGS` files and the tokenizer is a tokenizer.json, special
    tokens are added as in transformers 5 with its default settings. If the settings contain
    add_bos_token or add_eos_token, BOS is added only if add_bos_token is true, and EOS only if
    add_eos_token is true. If the settings contain neither flag, tokenizer.json determines the
    special tokens, and must be able to encode the letter "a". In all other cases, no special tokens
    are added. Raises `UsageError` if a settings file cannot be read as a JSON object, or if the
    package `tokenizers` is needed but not installed.
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
    """Return the ID of a token, or None if the token is unknown.

    `given` is the token's name, or a dictionary with the name as its `content`.
    """
    name = given.get("content") if isinstance(given, dict) else given
    return tokenizer.vocabulary().get(name) if isinstance(name, str) else None


def _added(
    settings: Mapping[str, Any], tokenizer: HFTokenizer, bos: int | None, eos: int | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the IDs of the special tokens to add before and after a text."""
    flags = {"add_bos_token": bos, "add_eos_token": eos}
    if not flags.keys() & settings.keys():
        return tokenizer.tokens_around()
    before, after = (
        (token,) if settings.get(flag) and token is not None else ()
        for flag, token in flags.items()
    )
    return before, after
