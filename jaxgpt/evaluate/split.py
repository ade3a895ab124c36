"""Loss of a whole split: every token but the first of a source is predicted exactly once.

If the data has a loss mask, only the tokens that it counts are in the loss, and in its counts.
"""

import bisect
import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from jaxgpt.config import UsageError
from jaxgpt.data.dataset import Dataset, open_dataset, with_vocabulary
from jaxgpt.data.token_file import Tokens
from jaxgpt.data.tokenizers import Tokenizer, same_tokens
from jaxgpt.evaluate.model import Model, Rows, Trained

ANY_VOCABULARY = 2**31 - 1  # data of any vocabulary is opened, and then compared with the model's
PIECE = 2**20  # tokens that are read at a time to check them


@dataclass(frozen=True)
class Loss:
    """The loss of some tokens."""

    nats: float  # -log p of all of them
    n_tokens: int
    n_bytes: int | None  # in the UTF-8 text of these tokens; None without a tokenizer

    @property
    def mean(self) -> float:
        """The loss in nats a token; NaN without any token."""
        return self.nats / self.n_tokens if self.n_tokens else math.nan

    @property
    def perplexity(self) -> float:
        """Return exp(mean loss)."""
        return math.inf if self.mean >= 700 else math.exp(self.mean)

    @property
    def bits_per_byte(self) -> float | None:
        """The loss in bits a byte of text (arXiv 2101.00027, section 3.1): of any tokenizer."""
        return self.nats / math.log(2) / self.n_bytes if self.n_bytes else None

    def __add__(self, other: "Loss") -> "Loss":
        known = self.n_bytes is not None and other.n_bytes is not None
        n_bytes = self.n_bytes + other.n_bytes if known else None
        return Loss(self.nats + other.nats, self.n_tokens + other.n_tokens, n_bytes)


@dataclass(frozen=True)
class Windows:
    """Rows that predict each token of a text but the first once.

    They begin `stride` tokens apart. A token that two rows could predict is predicted by the first
    of them; all but those of the first row follow at least block_size - stride others.
    """

    n_tokens: int
    block_size: int
    stride: int

    def __len__(self) -> int:
        return 1 + max(0, -(-(self.n_tokens - 1 - self.block_size) // self.stride))

    def tokens(self, row: int) -> range:
        """Return which tokens a row holds: at most block_size + 1."""
        first = row * self.stride
        return range(first, min(first + self.block_size + 1, self.n_tokens))

    def predicted(self, row: int) -> slice:
        """Return which of a row's predictions count: of token i + 1 of the row, prediction i."""
        return slice(self.block_size - self.stride if row else 0, len(self.tokens(row)) - 1)


@dataclass(frozen=True)
class Split:
    """An opened split of a data set, and the rows that it is read in."""

    dataset: Dataset
    name: str
    trained: Trained  # with the token that ends a document of this data, for data.document_mask
    tokenizer: Tokenizer | None
    windows: tuple[Windows, ...]  # of each source
    warnings: tuple[str, ...] = ()

    @property
    def texts(self) -> list[Tokens]:
        """The tokens of each source."""
        return [source.tokens[self.name] for source in self.dataset.sources]

    def count_bytes(self) -> list[int | None]:
        """Return the bytes of each source's predicted tokens, None without a tokenizer.

        Raises `UsageError` if there is a token that the model does not know. Reads all tokens.
        """
        return [self._count_bytes(text) for text in self.texts]

    def _count_bytes(self, text: Tokens) -> int | None:
        end = None if self.tokenizer is None else self.tokenizer.end_of_text
        total = 0
        for first, piece in read_pieces(text, end):
            text.check_vocab_range(piece, first, self.trained.config.model.vocab_size)
            if self.tokenizer is not None:
                self.check_tokenizer_range(piece)
                total += self.tokenizer.count_bytes(_counted(text, first, piece))
        if self.tokenizer is None:
            return None
        first = _counted(text, 0, text.read(0, 1))  # which is not predicted
        return total - self.tokenizer.count_bytes(first)

    def check_tokenizer_range(self, tokens: np.ndarray) -> None:
        """Raise `UsageError` for a token that has no text."""
        if tokens.max() >= self.tokenizer.vocab_size:
            raise UsageError(
                f"{self.dataset.sources[0].entry.key}: holds token {tokens.max()}, but its "
                f"tokenizer has {self.tokenizer.vocab_size}; prepare the data again"
            )

    def rows(self) -> Rows:
        """Return the rows of all sources, one source after the other."""
        firsts = list(itertools.accumulate(map(len, self.windows), initial=0))
        texts = self.texts

        def read(row: int) -> np.ndarray:
            source = bisect.bisect_right(firsts, row, hi=len(texts)) - 1
            wanted = self.windows[source].tokens(row - firsts[source])
            return texts[source].read(wanted.start, len(wanted))

        return Rows(firsts[-1], self.windows[0].block_size, read)


def open_split(trained: Trained, name: str, stride: int | None = None) -> Split:
    """Open a split of the data that the configuration names.

    Raises `UsageError` if it is not there, is of another tokenizer than the model's, or if the
    stride is larger than a row.
    """
    config, T = trained.config, trained.block_size
    if stride is not None and stride > T:
        raise UsageError(f"--stride={stride}: must be at most {T}, the tokens of a row")
    if trained.data == "none":
        raise UsageError(
            "--dataset: is needed, as these weights came without data; give --dataset NAME, or "
            "data.path=DIR"
        )
    any_model = dataclasses.replace(config.model, vocab_size=ANY_VOCABULARY, block_size=1)
    dataset = open_dataset(config.data, any_model)
    warnings = _compare_tokenizers(trained, dataset)
    tokenizer = dataset.tokenizer or trained.tokenizer
    known = dataclasses.replace(dataset, vocab_size=config.model.vocab_size, tokenizer=tokenizer)
    trained = dataclasses.replace(trained, config=with_vocabulary(config, known))
    sizes = [s.tokens[name].size for s in dataset.sources]
    windows = tuple(Windows(size, T, stride or T) for size in sizes)
    return Split(dataset, name, trained, tokenizer, windows, warnings)


def _compare_tokenizers(trained: Trained, dataset: Dataset) -> tuple[str, ...]:
    """Refuse data of another tokenizer than the model's; return a warning where one is unknown."""
    source, ours, theirs = dataset.sources[0].entry, trained.tokenizer, dataset.tokenizer
    if theirs is None or ours is None:
        bare = source.key if theirs is None else "the model"
        warning = f"warning: {bare} has no tokenizer; the data is taken to have the model's tokens"
        return () if trained.data == "own" else (warning,)
    if same_tokens(ours, theirs):
        return ()
    what = (
        f"{source.key}: {source.path} has another tokenizer ({_describe(theirs)}) than "
        f"{trained.where} ({_describe(ours)})"
    )
    if trained.config.data.accept_changes:
        return (f"warning: {what}; accepted by data.accept_changes",)
    raise UsageError(
        f"{what}; prepare its text with the model's, or if the tokens are the same give "
        "data.accept_changes=True"
    )


def _describe(tokenizer: Tokenizer) -> str:
    return f"{tokenizer.to_meta()['type']}, {tokenizer.vocab_size} tokens"


def read_pieces(text: Tokens, end_of_text: int | None) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (number of the first token, ids) of all tokens, cut at the end of a text if possible.

    Some tokenizers decode a text only as a whole.
    """
    first = 0
    while first < text.size:
        piece = text.read(first, min(PIECE, text.size - first))
        if end_of_text is not None and first + piece.size < text.size:
            ends = np.flatnonzero(piece == end_of_text)
            if ends.size:
                piece = piece[: ends[-1] + 1]
        yield first, piece
        first += piece.size


def _counted(text: Tokens, first: int, values: np.ndarray) -> np.ndarray:
    """Return those values of the tokens from number `first` on whose tokens count in the loss."""
    return values if text.mask is None else values[text.read_weights(first, values.size) > 0]


def corpus_losses(model: Model, split: Split, n_bytes: list[int | None]) -> dict[str, Loss]:
    """Return the loss of each corpus, added up in float64 on the host.

    In the order of the text, whatever the batch and mesh. All processes take part.
    """
    scores = model.score(split.rows())
    found: dict[str, list[Loss]] = defaultdict(list)
    for source, windows, size in zip(split.dataset.sources, split.windows, n_bytes, strict=True):
        row_sums, n_tokens, text = [], 0, source.tokens[split.name]
        for row in range(len(windows)):
            (losses,) = next(scores)
            tokens, predicted = windows.tokens(row), windows.predicted(row)
            counted = _counted(text, tokens.start + 1 + predicted.start, losses[predicted])
            row_sums.append(float(counted.sum(dtype=np.float64)))
            n_tokens += counted.size
        total = Loss(math.fsum(row_sums), n_tokens, size)
        found[source.entry.corpus].append(total)
    assert next(scores, None) is None
    return {name: sum_losses(losses) for name, losses in found.items()}


def sum_losses(losses: list[Loss]) -> Loss:
    """Return the loss of all tokens of several."""
    first, *others = losses
    return sum(others, start=first)
