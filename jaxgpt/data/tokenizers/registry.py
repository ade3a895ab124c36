"""Which tokenizer it is: by the description that data came with, or as a user names it."""

import json
from pathlib import Path
from typing import Any

from jaxgpt.config import UsageError
from jaxgpt.data.tokenizers.char import ByteTokenizer, CharTokenizer, Tokenizer
from jaxgpt.data.tokenizers.huggingface import HFTokenizer, read_tokenizer


def tokenizer_from_meta(meta: dict[str, Any], directory: Path) -> Tokenizer:
    """Return the tokenizer that `to_meta` described, and `save` wrote to `directory`.

    Raises:
        UsageError: for a type that this version does not know, or files that are missing or not
            those that were saved.
    """
    match meta.get("type"):
        case "char":
            return CharTokenizer(meta["characters"])
        case "byte":
            return ByteTokenizer()
        case "huggingface":
            return HFTokenizer.from_meta(meta, directory)
    raise UsageError(
        f"tokenizer.type={meta.get('type')}: in meta.json must be char, byte or huggingface"
    )


def load_tokenizer(path: Path | str, end_of_text: str | None = None) -> Tokenizer:
    """Return the tokenizer that a user names.

    Args:
        path: `byte`; the folder of a prepared data set; or what `read_tokenizer` takes.
        end_of_text: the text of the token between documents, of tokenizers in files.

    Raises:
        UsageError: if there is no tokenizer, or it has no such token.
    """
    path = Path(path)
    if str(path) == "byte":
        return ByteTokenizer()
    description = path / "meta.json"
    if not description.is_file() or end_of_text is not None:
        return read_tokenizer(path, end_of_text)
    try:
        meta = json.loads(description.read_text())["tokenizer"]
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{description}: describes no tokenizer ({error!r})") from None
    return tokenizer_from_meta(meta, path)
