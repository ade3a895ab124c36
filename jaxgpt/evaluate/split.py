"""Loss on a full split: every token of a source, except the first, is predicted exactly once.

If the data has a loss mask, the loss and the token and byte counts include only tokens with a
weight above 0.
"""

import bisect
import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxgpt.config import UsageError
from jaxgpt.data.dataset import Dataset, open_dataset, with_vocabulary
from jaxgpt.data.token_file import Tokens
from jaxgpt.data.tokenizers import Tokenizer, same_tokens
from jaxgpt.evaluate.model import Model, Rows
from jaxgpt.evaluate.trained import Trained
from jaxgpt.train.resume import with_moved_tokenizer

ANY_VOCABULARY = 2**31 - 1  # accepts data with any vocabulary; tokenizers are compared later
ALL = "all"  # selects all splits
CHUNK_TOKENS = 2**20  # tokens to read and check at a time


@dataclass(frozen=True)
class Loss:
    """The total loss over a set of tokens."""

    nats: float  # sum of -ln p over the tokens
    n_tokens: int
    n_bytes: int | None  # size of the tokens' UTF-8 text; None if there is no tokenizer

    @property
    def mean(self) -> float:
        """The mean loss in nats per token; NaN if there are no tokens."""
        return self.nats / self.n_tokens if self.n_tokens else math.nan

    @property
    def perplexity(self) -> float:
        """exp(mean loss), or infinity if the mean loss is at least 700 nats."""
        return math.inf if self.mean >= 700 else math.exp(self.mean)

    @property
    def bits_per_byte(self) -> float | None:
        """The loss in bits per byte of text (arXiv 2101.00027, section 3.1).

        This number can be compared across tokenizers. It is None if the tokenizer is unknown or the
        text is empty.
        """
        return self.nats / math.log(2) / self.n_bytes if self.n_bytes else None

    def __add__(self, other: "Loss") -> "Loss":
        known = self.n_bytes is not None and other.n_bytes is not None
        n_bytes = self.n_bytes + other.n_bytes if known else None
        return Loss(self.nats + other.nats, self.n_tokens + other.n_tokens, n_bytes)


@dataclass(frozen=True)
class Windows:
    """Rows that predict each token of a sequence, except the first, exactly once.

    `n_tokens` must be at least 1, and `stride` must be between 1 and `block_size`. Rows start
    `stride` tokens apart. A token is predicted in the first row that contains it. Outside the first
    row, every predicted token has a context of at least block_size - stride tokens.
    """

    n_tokens: int
    block_size: int
    stride: int

    def __len__(self) -> int:
        return 1 + max(0, -(-(self.n_tokens - 1 - self.block_size) // self.stride))

    def tokens(self, row: int) -> range:
        """Return the indices of the tokens in a row, at most block_size + 1."""
        first = row * self.stride
        return range(first, min(first + self.block_size + 1, self.n_tokens))

    def predicted(self, row: int) -> slice:
        """Return a slice that selects the predictions of a row that count toward the loss.

        Prediction i is for token i + 1.
        """
        return slice(self.block_size - self.stride if row else 0, len(self.tokens(row)) - 1)


@dataclass(frozen=True)
class Split:
    """An open split of a dataset, and its division into rows."""

    dataset: Dataset  # its vocabulary size is `ANY_VOCABULARY`
    name: str  # name of a split, or `ALL`
    trained: Trained  # its config has the end-of-text token if data.document_mask is set
    tokenizer: Tokenizer | None
    windows: tuple[Windows, ...]  # rows of each sequence in `texts`
    warnings: tuple[str, ...] = ()

    @property
    def texts(self) -> list[Tokens]:
        """The token sequences to score: one for each source, or for each split of a source."""
        return [tokens for source in self.dataset.sources for tokens in source.tokens.values()]

    @property
    def corpora(self) -> list[str]:
        """The corpus name of each sequence in `texts`."""
        return [s.entry.corpus for s in self.dataset.sources for _ in s.tokens]

    def count_bytes(self) -> list[int | None]:
        """Return the number of UTF-8 bytes in the predicted tokens of each sequence in `texts`.

        The chunks of `read_chunks` are counted separately, as in `Tokenizer.count_bytes`.
        End-of-text tokens, and tokens that do not count toward the loss, are excluded. All tokens
        are read and checked. If the tokenizer is unknown, every number is None, and masks are not
        read.
        """
        return [self._count_bytes(text) for text in self.texts]

    def _count_bytes(self, text: Tokens) -> int | None:
        end = None if self.tokenizer is None else self.tokenizer.end_of_text
        total = 0
        for first, chunk in read_chunks(text, end):
            text.check_vocab_range(chunk, first, self.trained.config.model.vocab_size)
            if self.tokenizer is not None:
                self.check_tokenizer_range(chunk)
                total += self.tokenizer.count_bytes(_counted(text, first, chunk))
        if self.tokenizer is None:
            return None
        first = _counted(text, 0, text.read(0, 1))  # the first token is not predicted
        return total - self.tokenizer.count_bytes(first)

    def check_tokenizer_range(self, tokens: np.ndarray) -> None:
        """Raise `UsageError` if any token ID is too large for the tokenizer's vocabulary.

        `tokens` must not be empty, and the tokenizer must be known.
        """
        if tokens.max() >= self.tokenizer.vocab_size:
            raise UsageError(
                f"{self.dataset.sources[0].entry.key}: contains token {tokens.max()}, but the "
                f"tokenizer has only {self.tokenizer.vocab_size} tokens; prepare the data again"
            )

    def rows(self) -> Rows:
        """Return the rows of all `texts`, in order."""
        firsts = list(itertools.accumulate(map(len, self.windows), initial=0))
        texts = self.texts

        def read(row: int) -> np.ndarray:
            text = bisect.bisect_right(firsts, row, hi=len(texts)) - 1
            wanted = self.windows[text].tokens(row - firsts[text])
            return texts[text].read(wanted.start, len(wanted))

        return Rows(firsts[-1], self.windows[0].block_size, read)


def open_split(trained: Trained, name: str, stride: int | None = None) -> Split:
    """Open a split of the data in `trained.config`, or all of the data if `name` is `ALL`.

    Rows start `stride` >= 1 tokens apart. The default is `trained.block_size`. Raises `UsageError`
    if the weights were imported and no data setting is given, or if the stride is larger than a
    row.
    """
    config, T = with_moved_tokenizer(trained.config, Path(trained.where)), trained.block_size
    if stride is not None and stride > T:
        raise UsageError(f"--stride={stride}: must be at most {T}, the length of a row")
    if trained.data == "none":
        raise UsageError(
            "--dataset: is required, because imported weights have no data; give --dataset NAME, "
            "data.path=DIR or --input FILE"
        )
    any_model = dataclasses.replace(config.model, vocab_size=ANY_VOCABULARY, block_size=1)
    dataset = open_dataset(config.data, any_model, None if name == ALL else [name])
    warnings = _compare_tokenizers(trained, dataset)
    tokenizer = dataset.tokenizer or trained.tokenizer
    known = dataclasses.replace(dataset, vocab_size=config.model.vocab_size, tokenizer=tokenizer)
    trained = dataclasses.replace(trained, config=with_vocabulary(config, known))
    split = Split(dataset, name, trained, tokenizer, (), warnings)
    windows = tuple(Windows(text.size, T, stride or T) for text in split.texts)
    return dataclasses.replace(split, windows=windows)


def _compare_tokenizers(trained: Trained, dataset: Dataset) -> tuple[str, ...]:
    """Raise `UsageError` if the tokenizers of the data and the model differ; return warnings.

    If data.accept_changes is set, different tokenizers only cause a warning. An unknown tokenizer
    also causes a warning, unless the data comes from the run.
    """
    source, ours, theirs = dataset.sources[0].entry, trained.tokenizer, dataset.tokenizer
    if theirs is None or ours is None:
        bare = source.key if theirs is None else "the model"
        warning = f"warning: {bare} has no tokenizer; assuming that data and model use the same one"
        return () if trained.data == "own" else (warning,)
    if same_tokens(ours, theirs):
        return ()
    what = (
        f"{source.key}: {source.path} has a different tokenizer ({_describe(theirs)}) from "
        f"{trained.where} ({_describe(ours)})"
    )
    if trained.config.data.accept_changes:
        return (f"warning: {what}; accepted by data.accept_changes",)
    raise UsageError(
        f"{what}; prepare the data with the model's tokenizer, or set data.accept_changes=True if "
        "the tokens are the same"
    )


def _describe(tokenizer: Tokenizer) -> str:
    return f"{tokenizer.to_meta()['type']}, {tokenizer.vocab_size} tokens"


def read_chunks(text: Tokens, end_of_text: int | None) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (index of the first token, token IDs) for chunks of at most `CHUNK_TOKENS` tokens.

    The IDs have shape (n,) and the file's dtype. If possible, chunks end at document boundaries,
    because some tokenizers can only decode complete documents.
    """
    first = 0
    while first < text.size:
        chunk = text.read(first, min(CHUNK_TOKENS, text.size - first))
        if end_of_text is not None and first + chunk.size < text.size:
            ends = np.flatnonzero(chunk == end_of_text)
            if ends.size:
                chunk = chunk[: ends[-1] + 1]
        yield first, chunk
        first += chunk.size


def _counted(text: Tokens, first: int, values: np.ndarray) -> np.ndarray:
    """Return the values of the tokens that count toward the loss.

    `values` (n,) has one value for each token, starting at token `first`.
    """
    return values if text.mask is None else values[text.read_weights(first, values.size) > 0]


def corpus_losses(model: Model, split: Split, n_bytes: list[int | None]) -> dict[str, Loss]:
    """Return a dict that maps each corpus name to its total loss.

    Losses are summed in float64 on the host. The order of summation does not depend on the batch
    size or the mesh. `n_bytes` is the result of `Split.count_bytes`. All processes must call this.
    """
    scores = model.score(split.rows())
    found: dict[str, list[Loss]] = defaultdict(list)
    for corpus, text, windows, size in zip(
        split.corpora, split.texts, split.windows, n_bytes, strict=True
    ):
        row_sums, n_tokens = [], 0
        for row in range(len(windows)):
            (losses,) = next(scores)
            tokens, predicted = windows.tokens(row), windows.predicted(row)
            counted = _counted(text, tokens.start + 1 + predicted.start, losses[predicted])
            row_sums.append(float(counted.sum(dtype=np.float64)))
            n_tokens += counted.size
        total = Loss(math.fsum(row_sums), n_tokens, size)
        found[corpus].append(total)
    assert next(scores, None) is None
    return {name: sum_losses(losses) for name, losses in found.items()}


def sum_losses(losses: list[Loss]) -> Loss:
    """Return the sum of a non-empty list of losses."""
    first, *others = losses
    return sum(others, start=first)
