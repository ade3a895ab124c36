"""The numbers that a training step computes: add one here, and every tracker shows it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from jaxgpt.models.loss import LogitMetric
from jaxgpt.parallel.sharding import Params
from jaxgpt.spikes.detector import Detection


class StepValues(NamedTuple):
    """What a metric can be computed from, on the device; whole arrays."""

    loss: jax.Array  # mean cross-entropy of the global batch, nats per token: float32 scalar
    grad_norm: jax.Array  # global norm of the gradient before clipping: float32 scalar
    lr: jax.Array  # learning rate: float32 scalar
    row_losses: jax.Array  # mean loss of each row of the global batch, in its order: float32 (B,)
    gradients: Params  # before clipping
    params: Params  # before the update


@dataclass(frozen=True)
class Metric:
    """A float32 scalar of a step, on the device and the same on every one."""

    legend: str  # the text that explains it to a user
    compute: Callable[[StepValues], jax.Array] | LogitMetric  # from the step's values or logits


STEP_METRICS: dict[str, Metric] = {
    "loss": Metric("mean cross-entropy of the global batch, nats per token", lambda v: v.loss),
    "grad_norm": Metric("global norm of the gradient before clipping", lambda v: v.grad_norm),
    "lr": Metric("learning rate", lambda v: v.lr),
}


class Metrics(NamedTuple):
    """What a step reports."""

    scalars: dict[str, jax.Array]  # the numbers of `STEP_METRICS`, by name
    row_losses: jax.Array  # mean loss of each row of the global batch, in its order: float32 (B,)
    detection: Detection

    @property
    def loss(self) -> jax.Array:
        """Mean cross-entropy over all tokens of the global batch, in nats."""
        return self.scalars["loss"]


def logit_metrics() -> dict[str, LogitMetric]:
    """Return the metrics that are computed from logits."""
    return {n: m.compute for n, m in STEP_METRICS.items() if isinstance(m.compute, LogitMetric)}


def step_scalars(values: StepValues, from_logits: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Return all scalars of a step, given those that its logits gave."""
    return {
        name: from_logits[name] if name in from_logits else metric.compute(values)
        for name, metric in STEP_METRICS.items()
    }
