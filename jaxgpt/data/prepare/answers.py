"""Tokenization of prompts and answers, with loss masks that select the answers."""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from jaxgpt.data.prepare.json_lines import LineDocument
from jaxgpt.data.tokenizers import Tokenizer


def encode_answers(
    documents: Sequence[LineDocument], tokenizer: Tokenizer
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield (token IDs, loss weights) for each document: int64 and uint8, shape (tokens,).

    The weight is 1 for answer tokens and 0 for all others. The whole text is tokenized at once,
    unless this would change the tokens of the text before the start or end of an answer. In that
    case, the text is split there before it is tokenized, because at inference the model sees only
    the prompt. There must be at least one document. Every document must have text and answers, and
    all documents must have the same `has_special`.
    """
    cuts = [_cuts(document) for document in documents]
    has_special = documents[0].has_special
    heads = [d.text[:cut] for d, ends in zip(documents, cuts, strict=True) for cut in ends]
    encoded = iter(tokenizer.encode_batch(heads, has_special))
    for document, ends in zip(documents, cuts, strict=True):
        parts = _parts(document, ends, list(itertools.islice(encoded, len(ends))), tokenizer)
        begins = [0, *ends[:-1]]
        weights = [
            any(first <= begin and end <= last for first, last in document.answers)
            for begin, end in zip(begins, ends, strict=True)
        ]
        yield np.concatenate(parts), np.repeat(np.uint8(weights), [part.size for part in parts])


def _cuts(document: LineDocument) -> list[int]:
    """Return the end offset of each part. A part is an answer or the text between answers."""
    return sorted({*itertools.chain(*document.answers), len(document.text)} - {0})


def _parts(
    document: LineDocument, ends: list[int], encoded: list[np.ndarray], tokenizer: Tokenizer
) -> list[np.ndarray]:
    """Return each part's token IDs. `encoded[i]` holds the IDs of `document.text[:ends[i]]`."""
    out, start, cut, before = [], 0, 0, np.empty(0, np.int64)
    for end, ids in zip(ends, encoded, strict=True):
        if start:
            (ids,) = tokenizer.encode_batch([document.text[start:end]], document.has_special)
        if not np.array_equal(ids[: before.size], before):  # the tokens before `cut` change
            start, before = cut, before[:0]
            (ids,) = tokenizer.encode_batch([document.text[start:end]], document.has_special)
        out.append(ids[before.size :])
        before, cut = ids, end
    return out
