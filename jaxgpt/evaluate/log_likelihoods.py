"""Log-likelihoods of continuations, for lm_eval."""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxgpt.evaluate.model import Model, Rows


class Pair(NamedTuple):
    """Token IDs of a context and its continuation."""

    context: list[int]
    continuation: list[int]


class LogLikelihood(NamedTuple):
    """Log-likelihood of a continuation given its context."""

    nats: float
    is_greedy: bool  # whether each token of the continuation is the most likely one


def log_likelihoods(model: Model, pairs: Sequence[Pair]) -> list[LogLikelihood]:
    """Return the log-likelihood of each continuation, in the order of `pairs`.

    A context must have at least one token, and a continuation must have at most `model.block_size`
    tokens. The caller must ensure that all tokens are in the vocabulary. A context is truncated on
    the left if it is too long. All processes must call this.
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
