"""Step metrics, fetched for several steps at once so that the device rarely waits for the host.

All processes read the same values after the same steps, so they make the same decisions.
"""

from typing import NamedTuple

import jax
import numpy as np

from jaxgpt.config import Config
from jaxgpt.perf.units import count
from jaxgpt.spikes.detector import LOSS
from jaxgpt.train.step import Metrics


class StepMetrics(NamedTuple):
    """Metrics of one step. `MetricsBuffer.read` returns them as NumPy arrays."""

    step: int
    metrics: Metrics


class MetricsBuffer:
    """Buffer of step metrics that are still on the device."""

    def __init__(self, config: Config):
        self._config = config
        self._pending: list[StepMetrics] = []
        self._is_first = True

    def read(self, step: int, metrics: Metrics | None, everything: bool) -> list[StepMetrics]:
        """Add the metrics of a step (None if it was skipped); return the metrics to report now.

        All buffered metrics are returned if `everything` is set, if `step` is the first step that
        is not skipped, or if it is a multiple of train.log_interval. Otherwise, if the previous
        training step calls for a rewind, the metrics up to that step are returned. In all other
        cases, the result is empty.
        """
        if metrics is not None:
            for array in jax.tree.leaves(metrics):
                # Start copying now, because copying many steps at once would delay the next step.
                array.copy_to_host_async()
            self._pending.append(StepMetrics(step, metrics))
        settled = len(self._pending) - (metrics is not None)  # all except the step in progress
        known = 0
        if everything or self._is_first or step % self._config.train.log_interval == 0:
            known = len(self._pending)
        elif settled and self.calls_for_rewind(self._pending[settled - 1 : settled]):
            known = settled
        self._is_first &= metrics is None
        taken, self._pending = self._pending[:known], self._pending[known:]
        return jax.device_get(taken)

    def calls_for_rewind(self, readings: list[StepMetrics]) -> StepMetrics | None:
        """Return the first step whose loss calls for a rewind, or None.

        Spikes in the gradient norm alone do not call for a rewind, because gradients are usually
        clipped. Non-finite steps do not call for a rewind, because their updates were not applied.
        The result is always None unless spike.action=rewind.
        """
        if self._config.spike.action != "rewind":
            return None
        return next((r for r in readings if int(r.metrics.detection.cause) == LOSS), None)

    def failure(self, readings: list[StepMetrics]) -> str:
        """Return the reason why the run has to stop, or an empty string if it can continue.

        A run has to stop if the loss of step train.max_iters is not finite. Unless spike.action is
        off, it also has to stop after spike.max_consecutive_nonfinite consecutive non-finite steps.
        """
        limit = self._config.spike.max_consecutive_nonfinite
        lengths = [(int(r.metrics.detection.nonfinite), r.step) for r in readings]
        reached = [(n, last) for n, last in lengths if n >= limit]
        if not reached:
            return self._failure_of_last(readings)
        n, last = reached[-1]
        return (
            f"spike.max_consecutive_nonfinite={limit}: the loss or gradient was not finite in "
            f"{count(n, 'consecutive step')}, up to step {last}; lower "
            "optimizer.learning_rate and start again in a new run directory, or, if there is an "
            "older checkpoint from before the loss diverged, remove the newer ones"
        )

    def _failure_of_last(self, readings: list[StepMetrics]) -> str:
        """Return an error message if the loss of the last step is not finite, else ""."""
        last = self._config.train.max_iters
        if all(r.step != last or np.isfinite(r.metrics.loss) for r in readings):
            return ""
        return (
            f"train.max_iters={last}: the loss of the last step is not finite; start again in a "
            "new run directory with an optimizer.learning_rate below "
            f"{self._config.optimizer.learning_rate:g}"
        )
