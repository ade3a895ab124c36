"""The losses of the corpora in the training data."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxgpt.data.loader import Loader
from jaxgpt.train.reporting.metrics import StepMetrics


class CorpusLosses:
    """Collects the losses of each corpus's rows between two log lines.

    Does nothing if there is only one corpus.
    """

    def __init__(self, loader: Loader):
        self._loader = loader
        self._expected: dict[int, Any] = {}  # step -> corpus of each row, until the losses arrive
        # For each step since the last log line: the corpora, losses and weights of its rows.
        self._rows: list[tuple[Any, Any, Any]] = []

    def expect(self, step: int) -> None:
        """Look up the corpora of a step's rows. Call this while the devices compute the step."""
        if len(self._loader.names) > 1:
            self._expected[step] = self._loader.corpora(step)

    def add(self, reading: StepMetrics) -> None:
        """Add the losses of a step."""
        if reading.step in self._expected:
            corpora, metrics = self._expected.pop(reading.step), reading.metrics
            self._rows.append((corpora, metrics.row_losses, metrics.row_weights))

    def take(self) -> dict[str, float | None]:
        """Return the mean losses since the last call, as `corpus_means` does.

        The result is empty if there is only one corpus.
        """
        rows, self._rows = self._rows, []
        return corpus_means(self._loader.names, rows) if len(self._loader.names) > 1 else {}


def corpus_means(
    names: Sequence[str], batches: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray | None]]
) -> dict[str, float | None]:
    """Return the weighted mean loss of each corpus, keyed by name.

    The loss of a corpus without targets is None.

    Args:
        batches: for each batch, arrays of shape (B,) with the corpus index, mean loss and total
            weight of each row. None instead of weights means that all rows have the same weight.
    """
    n = len(names)
    sums, totals = np.zeros(n), np.zeros(n)
    for corpora, losses, weights in batches:
        weights = np.ones(len(corpora)) if weights is None else np.float64(weights)
        sums += np.bincount(corpora, weights * losses, n)
        totals += np.bincount(corpora, weights, n)
    means = zip(names, sums, totals, strict=True)
    return {name: float(loss / total) if total else None for name, loss, total in means}
