"""Metrics of steps, fetched from the device many at a time, so that it never waits for the host;
all processes read the same numbers at the same steps, and so decide alike."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxgpt.config import Config
from jaxgpt.spikes.detector import LOSS
from jaxgpt.train.step import Metrics


class StepMetrics(NamedTuple):
    """A step's metrics on the host: NumPy arrays."""

    step: int
    metrics: Metrics


class MetricsBuffer:
    """Metrics of steps that are still on the device."""

    def __init__(self, config: Config):
        self._config = config
        self._pending: list[StepMetrics] = []
        self._is_first = True

    def read(self, step: int, metrics: Metrics | None, everything: bool) -> list[StepMetrics]:
        """Take a step's metrics (None for one that was skipped), and return those known now.

        All are known every train.log_interval steps, after the first step, and if `everything` is
        asked for; otherwise none, unless the step before this one calls for a rewind.
        """
        if metrics is not None:
            for array in jax.tree.leaves(metrics):
                array.copy_to_host_async()  # or reading many steps at once would hold up the next
            self._pending.append(StepMetrics(step, metrics))
        settled = len(self._pending) - (metrics is not None)  # all but the one under way
        known = 0
        if everything or self._is_first or step % self._config.train.log_interval == 0:
            known = len(self._pending)
        elif settled and self.calls_for_rewind(self._pending[settled - 1 : settled]):
            known = settled
        self._is_first &= metrics is None
        taken, self._pending = self._pending[:known], self._pending[known:]
        return jax.device_get(taken)

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
            return self._failure_of_last(readings)
        return (
            f"spike.max_consecutive_nonfinite={limit}: so many steps in a row, up to step "
            f"{reached[-1]}, were not finite, and changed nothing; go on from an older checkpoint "
            "by removing the newer ones, or with a lower optimizer.learning_rate"
        )

    def _failure_of_last(self, readings: list[StepMetrics]) -> str:
        """Return why the run has failed if its last step was not finite; else empty."""
        last = self._config.train.max_iters
        if all(r.step != last or np.isfinite(r.metrics.loss) for r in readings):
            return ""
        return (
            f"train.max_iters={last}: the loss of the last step is not finite; start again with a "
            f"lower optimizer.learning_rate than {self._config.optimizer.learning_rate:g}"
        )


def corpus_means(
    names: Sequence[str], batches: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray | None]]
) -> dict[str, float | None]:
    """Return the mean loss of each corpus over the targets of some batches.

    Args:
        batches: (corpus, loss, weight) of each row; None for the weights if all are equal.

    The mean is None for a corpus without targets.
    """
    n = len(names)
    sums, totals = np.zeros(n), np.zeros(n)
    for corpora, losses, weights in batches:
        weights = np.ones(len(corpora)) if weights is None else np.float64(weights)
        sums += np.bincount(corpora, weights * losses, n)
        totals += np.bincount(corpora, weights, n)
    means = zip(names, sums, totals, strict=True)
    return {name: float(loss / total) if total else None for name, loss, total in means}
