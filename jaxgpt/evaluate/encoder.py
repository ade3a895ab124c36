"""Tokenization for lm_eval, with the special tokens of a transformers tokenizer."""

from pathlib import Path
from typing import NamedTuple

from jaxgpt.convert.safetensors import read_json
from jaxgpt.data.tokenizers import HFTokenizer, Tokenizer, special_token

# transformers saves a tokenizer's settings in these files, next to the weights. If a setting is in
# both files, the first file takes precedence.
SETTINGS = ("tokenizer_config.json", "special_tokens_map.json")


class Encoder(NamedTuple):
    """A tokenizer, and the special tokens to add before and after its tokens."""

    tokenizer: Tokenizer
    prefix: int
    """Token ID that replaces an empty context: BOS, else EOS (both only if `encoder_of` uses the
    `SETTINGS` files), else end-of-text, else 0."""
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token IDs of a text, by default with special tokens."""
        tokens = self.tokenizer.encode(text).tolist()
        return [*self.before, *tokens, *self.after] if add_special_tokens else tokens


def encoder_of(folder: Path, tokenizer: Tokenizer) -> Encoder:
    """Return the encoder for the weights in a folder.

    If the folder has one of the `SETTINGS` files and the tokenizer is a tokenizer.json, the
    tokenizer.json determines the special tokens, as in transformers 5, and must be able to encode
    the letter "a". Otherwise, no special tokens are added.
    """
    end = tokenizer.end_of_text
    plain = Encoder(tokenizer, end or 0)
    found = [read_json(folder / name) for name in SETTINGS if (folder / name).is_file()]
    if not found or not isinstance(tokenizer, HFTokenizer):
        return plain
    settings = {key: value for one in reversed(found) for key, value in one.items()}
    names = (special_token(settings.get(key)) for key in ("bos_token", "eos_token"))
    ids = [None if name is None else tokenizer.vocabulary().get(name) for name in names]
    prefixes = (token for token in (*ids, end) if token is not None)
    return Encoder(tokenizer, next(prefixes, 0), *tokenizer.tokens_around())
