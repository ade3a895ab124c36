"""Metrics of steps, fetched from the device many at a time, so that it never waits for the host.

All processes read the same numbers at the same steps, and so decide alike.
"""

from typing import NamedTuple

import jax
import numpy as np

from jaxgpt.config import Config
from jaxgpt.spikes.detector import LOSS
from jaxgpt.train.reporting.step_metrics import Metrics


class StepMetrics(NamedTuple):
    """A step's metrics on the host: NumPy arrays."""

    step: int
    metrics: Metrics


class MetricsBuffer:
    """Metrics of steps that are still on the device."""

    def __init__(self, config: Config):
        self._config = config
        self._pending: list[StepMetrics] = []
        self._evaluate = 0  # of the pending ones
        self._is_first = True

    def read(self, step: int, metrics: Metrics | None, everything: bool) -> list[StepMetrics]:
        """Take a step's metrics (None for one that was skipped), and return what is known.

        That is all so far every train.log_interval steps, for the first step, and if `everything`
        is asked for; otherwise nothing. With spike.action=rewind every step but the newest, which
        is under way, is looked at, and a spike of the loss makes all but that one known.
        """
        if metrics is not None:
            for array in jax.tree.leaves(metrics):
                array.copy_to_host_async()  # or reading many steps at once would hold up the next
            self._pending.append(StepMetrics(step, metrics))
        if everything or self._is_first or step % self._config.train.log_interval == 0:
            known = len(self._pending)
        else:
            known = self._spike_seen(len(self._pending) - (metrics is not None))
        self._is_first &= metrics is None
        taken, self._pending = self._pending[:known], self._pending[known:]
        self._evaluate = max(0, self._evaluate - known)
        return [
            StepMetrics(*pair) for pair in jax.device_get([tuple(reading) for reading in taken])
        ]

    def _spike_seen(self, n: int) -> int:
        """Return n if one of the n oldest pending steps calls for a rewind, else 0."""
        if self._config.spike.action != "rewind":
            return 0
        new = self._pending[self._evaluate : n]
        self._evaluate = max(self._evaluate, n)
        return n if any(int(reading.metrics.detection.cause) == LOSS for reading in new) else 0

    def calls_for_rewind(self, readings: list[StepMetrics]) -> StepMetrics | None:
        """Return the first step that does. A gradient norm alone, clipped as it is, does not, and a
        step that was not finite has done no harm."""
        if self._config.spike.action != "rewind":
            return None
        return next((r for r in readings if int(r.metrics.detection.cause) == LOSS), None)

    def failure(self, readings: list[StepMetrics]) -> str:
        """Return why the run has to stop if too many steps in a row were not finite; else empty."""
        limit = self._config.spike.max_consecutive_nonfinite
        reached = [r.step for r in readings if int(r.metrics.detection.nonfinite) >= limit]
        if not reached:
            return ""
        return (
            f"spike.max_consecutive_nonfinite={limit}: so many steps in a row, up to step "
            f"{reached[-1]}, were not finite, and changed nothing; go on from an older checkpoint "
            "by removing the newer ones, or with a lower optimizer.learning_rate"
        )


class CorpusLosses:
    """Mean losses of the rows of each corpus."""

    def __init__(self, n_corpora: int):
        self._sums = np.zeros((2, n_corpora))  # of losses, and of rows

    def add(self, corpora: np.ndarray, row_losses: np.ndarray) -> None:
        """Count rows in, given the number of the corpus of each."""
        for sums, weights in zip(self._sums, (np.float64(row_losses), None), strict=True):
            sums += np.bincount(corpora, weights, minlength=len(sums))

    def means(self) -> list[float | None]:
        """Return the mean of each corpus; None for one that no row came from."""
        losses, rows = self._sums
        return [float(loss / n) if n else None for loss, n in zip(losses, rows, strict=True)]
