"""Tokens of documents of which only answers count in the loss, and the mask that says so."""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from jaxgpt.data.prepare.json_lines import Document
from jaxgpt.data.tokenizers import Tokenizer


def encode_answers(
    documents: Sequence[Document], tokenizer: Tokenizer
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the token ids of each document, and their weights: uint8, 1 for tokens of answers.

    What comes before an answer has the tokens that it has alone, as when a model is asked. Tokens
    are those of the whole text unless one of them would reach into an answer or out of it.
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


def _cuts(document: Document) -> list[int]:
    """Return the ends of the parts that a text has: answers and what is between them."""
    return sorted({*itertools.chain(*document.answers), len(document.text)} - {0})


def _parts(
    document: Document, ends: list[int], encoded: list[np.ndarray], tokenizer: Tokenizer
) -> list[np.ndarray]:
    """Return the token ids of each part, from those of the text up to each part's end."""
    out, start, cut, before = [], 0, 0, np.empty(0, np.int64)
    for end, ids in zip(ends, encoded, strict=True):
        if start:
            (ids,) = tokenizer.encode_batch([document.text[start:end]], document.has_special)
        if not np.array_equal(ids[: before.size], before):  # a token reaches over the cut
            start, before = cut, before[:0]
            (ids,) = tokenizer.encode_batch([document.text[start:end]], document.has_special)
        out.append(ids[before.size :])
        before, cut = ids, end
    return out
