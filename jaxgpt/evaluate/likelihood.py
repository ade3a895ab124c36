"""Log-likelihood of a text after another one, as EleutherAI's lm_eval defines it."""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxgpt.evaluate.encoder import Encoder
from jaxgpt.evaluate.model import Model, Rows


class Pair(NamedTuple):
    """Token ids of a text, and of the one that follows it."""

    context: list[int]
    continuation: list[int]


class LogLikelihood(NamedTuple):
    """Log-likelihood of a continuation after its context."""

    nats: float
    is_greedy: bool  # each of its tokens is the likeliest one


def encode_pair(encoder: Encoder, context: str, continuation: str) -> Pair:
    """Encode both together, and split where the context alone ends.

    As lm_eval's `TemplateLM._encode_pair`: spaces at the end of the context go to the continuation,
    whose first token mostly begins with one. An empty context is the encoder's prefix.
    """
    stripped = context.rstrip()
    continuation = context[len(stripped) :] + continuation
    if not stripped:
        tokens = encoder.encode(continuation, add_special_tokens=False)
        if tokens[:1] == [encoder.prefix]:
            return Pair(tokens[:1], tokens[1:])
        return Pair([encoder.prefix], tokens)
    before = encoder.encode(stripped)
    return Pair(before, encoder.encode(stripped + continuation)[len(before) :])


def log_likelihoods(model: Model, pairs: Sequence[Pair]) -> list[LogLikelihood]:
    """Return the log-likelihood of each pair's continuation, of at most model.block_size tokens.

    A context is cropped from the left. All processes of the job take part.
    """
    rows = [(p.context + p.continuation)[-(model.block_size + 1) :] for p in pairs]
    by_length = defaultdict(list)
    for number, row in enumerate(rows):
        by_length[model.row_length(len(row) - 1)].append(number)
    found: dict[int, LogLikelihood] = {}
    for length, members in sorted(by_length.items()):

        def read(i: int, members: list[int] = members) -> np.ndarray:
            return np.array(rows[members[i]], np.int32)

        scores = model.score(Rows(len(members), length, read), with_likeliest=True)
        for number, (losses, likeliest) in zip(members, scores, strict=True):
            end, n = len(rows[number]) - 1, len(pairs[number].continuation)
            assert n <= end, (n, end)
            here = slice(end - n, end)
            is_greedy = np.array_equal(likeliest[here], pairs[number].continuation)
            found[number] = LogLikelihood(-float(losses[here].sum(dtype=np.float64)), is_greedy)
    return [found[number] for number in range(len(pairs))]
