"""Prepare a dataset from the user's text."""

import re
from collections.abc import Sequence
from concurrent.futures import Executor
from pathlib import Path

from jaxgpt.config import UsageError
from jaxgpt.data.prepare.builtin import summary
from jaxgpt.data.prepare.corpus import Corpus, write_megatron, write_nanogpt
from jaxgpt.data.prepare.files import find_files
from jaxgpt.data.prepare.json_lines import LineFormat
from jaxgpt.data.tokenizers import ByteTokenizer, CharTokenizer, Tokenizer, load_tokenizer

CHAR_TOKENIZER = (
    "tokenizer: char, one token per character; --tokenizer selects another, such as byte, a "
    "tokenizer.json or a folder with encoder.json and vocab.bpe"
)


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
        val_share: share of the data to use for validation. If None, the default in `corpus.py` is
            used. If 0, all of the text goes to `train`. Megatron data is not split.
        split: `train`, `val` or `test`; all of the text goes to this split. By default, the text is
            divided into training and validation data.
        megatron: write NAME_KEY_document.bin and .idx instead of a folder with meta.json.
        end_of_text: name of the end-of-text token, if `tokenizer` is a path; see `load_tokenizer`.
        pool: worker processes that tokenize files together with this process.

    Raises:
        UsageError: if `chat_template` is given but all files are text, or if `megatron` is set and
            the tokenizer is a character vocabulary.
    """
    files, ignored = find_files(inputs)
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
        said = summary(made.tokenizer, made.tokens)
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
    if ignored:
        said.append(
            f"ignored {len(ignored):,} file{'s' * (len(ignored) > 1)} with an unknown suffix, such "
            f"as {ignored[0]}"
        )
    return said


def megatron_name(directory: Path) -> str:
    """Return a folder's name without the suffix `_KEY_document`, where KEY has no underscore."""
    return re.sub(r"_[^_]+_document$", "", directory.name)
