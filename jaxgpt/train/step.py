"""A training step on a mesh as a pure function: loss, gradients and update."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from jaxgpt.data.batch import Batch, TokenRows, batch_specs, make_batch, total_weight
from jaxgpt.models.loss import LossParts
from jaxgpt.optim import make_optimizer
from jaxgpt.optim.parameters import Parameters
from jaxgpt.optim.update import clip_by_norm, gated_update, global_norm
from jaxgpt.parallel.collectives import gather_batch
from jaxgpt.parallel.schedule import Microbatches, Objective
from jaxgpt.parallel.sharding import Params
from jaxgpt.parallel.zero import local_params, reduce_gradients
from jaxgpt.spikes.detector import Detection, detect_and_gate
from jaxgpt.spikes.faults import inject_nan
from jaxgpt.tracking.train_line import MetricFormat
from jaxgpt.train.layers import layer_values
from jaxgpt.train.sharded_model import ShardedModel
from jaxgpt.train.state import TrainState


class StepValues(NamedTuple):
    """Inputs of `Metric.compute`, which runs inside the compiled step. All arrays are global.

    With parallel.offload=state, `gradients` and `params` are in host memory.
    """

    loss: jax.Array  # weighted mean cross-entropy of the global batch in nats: float32 scalar
    grad_norm: jax.Array  # global norm of the gradient before clipping: float32 scalar
    lr: jax.Array  # learning rate: float32 scalar
    rows: dict[str, jax.Array]  # `LossParts.rows` and `LossParts.aux`: float32 (B,), by name
    gradients: Params  # before clipping
    params: Params  # before the update


class Metric(NamedTuple):
    """A metric of a step: a float32 scalar, replicated on every device."""

    format: MetricFormat
    compute: Callable[[StepValues], jax.Array]


# Scalar metrics of a step that the devices compute. They appear in metrics.jsonl, in every tracker
# and, if the line is wide enough, on the console.
STEP_METRICS = {
    "loss": Metric(
        MetricFormat("mean cross-entropy, nats per token", rank=0, show="{:.4f}".format, width=6),
        lambda values: values.loss,
    ),
    "grad_norm": Metric(
        MetricFormat("global norm of the unclipped gradient", "gnorm", 3, "{:.3f}".format, width=6),
        lambda values: values.grad_norm,
    ),
    "lr": Metric(
        MetricFormat("learning rate", rank=6, show="{:.3g}".format), lambda values: values.lr
    ),
}


class Metrics(NamedTuple):
    """Results of a step, except the new state."""

    scalars: dict[str, jax.Array]  # float32 scalars: the metrics in `STEP_METRICS`, by name
    row_losses: jax.Array  # float32 (B,): weighted mean loss of each row in nats; 0 without targets
    row_weights: jax.Array | None  # float32 (B,): each row's total weight; None if there is no mask
    detection: Detection
    layers: dict[str, jax.Array] | None = None
    """The result of `layer_values`."""

    @property
    def loss(self) -> jax.Array:
        """Weighted mean cross-entropy of the global batch in nats; 0 without targets.

        This is a float32 scalar.
        """
        return self.scalars["loss"]


def train_step(
    model: ShardedModel,
    state: TrainState,
    step: jax.Array,
    lr: jax.Array,
    token_rows: jax.Array | TokenRows,
) -> tuple[TrainState, Metrics]:
    """Return the state after a step, and the metrics of the step.

    If `detect_and_gate` rejects the update (for example because the loss is not finite), the
    parameters and optimizer state stay bitwise unchanged.

    Args:
        step: step number, starting at 1: int32 scalar.
        lr: learning rate of the step, from `optim.schedule.learning_rate`: float32 scalar.
        token_rows: the global batch, as the loader supplies it: int32 (B, T+1) or `TokenRows`.
    """
    config = model.config
    batch = make_batch(token_rows, end_of_text=config.document_end)
    rows, gradients = loss_and_gradients(model, state.params, step, batch)
    row_weights = batch.weights.sum(axis=1)
    row_losses = weighted_mean(rows["loss"], row_weights)
    loss, grad_norm = rows["loss"].sum() / total_weight(batch), global_norm(gradients)
    spike_state, detection, update_is_due = detect_and_gate(
        config.spike, state.spike_state, loss, grad_norm
    )

    def update(
        parameters: Parameters, gradients: Params, params: Params, opt_state: optax.OptState
    ) -> tuple[Params, optax.OptState]:
        optimizer = make_optimizer(config.optimizer, parameters)
        clipped = clip_by_norm(gradients, grad_norm, config.optimizer.grad_clip)
        directions, opt_state = optimizer.update(clipped, opt_state, params)
        return jax.tree.map(lambda p, u: p - lr * u, params, directions), opt_state

    on_cpu = model.mesh.devices.flat[0].platform == "cpu"
    by_layer = config.parallel.offload != "none"
    gate = functools.partial(gated_update, update_is_due, on_cpu=on_cpu, by_layer=by_layer)
    params, opt_state = gate(update, model.parameters, gradients, state.params, state.opt_state)
    values = StepValues(loss, grad_norm, lr, rows, gradients, state.params)
    scalars = {name: metric.compute(values) for name, metric in STEP_METRICS.items()}
    metrics = Metrics(
        scalars,
        row_losses,
        row_weights if isinstance(token_rows, TokenRows) else None,
        detection,
        layer_values(model, step, batch, gradients, state.params),
    )
    return TrainState(params, opt_state, spike_state), metrics


def loss_and_gradients(
    model: ShardedModel, params: Params, step: jax.Array, batch: Batch
) -> tuple[dict[str, jax.Array], Params]:
    """Return the losses of each row, and the gradients of the weighted mean loss.

    Auxiliary losses are added to the loss before it is differentiated (see `mlp.AuxLosses`).
    `step` (int32, counted from 1) selects the dropout masks, and is passed to `inject_nan`.

    Returns:
        `LossParts.rows` and `LossParts.aux` of the global batch, by name: float32 (B,). The entry
        `loss` is each row's weighted sum of token losses in nats, without auxiliary losses.
        The float32 gradients, sharded as specified by `ParamLayout.grad`. With
        parallel.offload=state, they are in host memory.
    """
    everywhere = PartitionSpec()
    grad_specs = jax.tree.map(lambda layout: layout.grad, model.layouts)
    return jax.shard_map(
        functools.partial(_local_loss_and_gradients, model),
        mesh=model.mesh,
        in_specs=(model.param_specs, everywhere, batch_specs(model.mesh), everywhere),
        out_specs=(everywhere, grad_specs),
    )(params, step, batch, total_weight(batch))


def weighted_mean(sums: jax.Array, weights: jax.Array) -> jax.Array:
    """Return `sums / weights` elementwise, and 0 where the weight is 0."""
    return jnp.where(weights == 0, 0.0, sums / jnp.where(weights == 0, 1.0, weights))


# The rest of this file runs inside `jax.shard_map`, on this device's shards.


def _local_loss_and_gradients(
    model: ShardedModel, params: Params, step: jax.Array, batch: Batch, weight_sum: jax.Array
) -> tuple[dict[str, jax.Array], Params]:
    """Compute `loss_and_gradients` on one device.

    Args:
        weight_sum: `total_weight` of the global batch. Gradients are divided by it.
    """
    config, in_host = model.config, model.config.parallel.offload == "state"
    params, grad_accumulators = local_params(params, model.layouts)

    def scalar(parts: LossParts) -> jax.Array:
        loss = parts.loss
        if parts.aux:  # the gradients are divided by the sum of weights, not the number of tokens
            n_tokens = float(config.train.batch_size * config.model.block_size)  # may exceed int32
            loss += weight_sum / n_tokens * sum(aux_B.sum() for aux_B in parts.aux.values())
        loss = inject_nan(config, loss, model.mesh, step)
        return loss / weight_sum if in_host else loss

    parts, gradients = model.schedule.gradients(
        Objective(model.network, scalar, adds_in_place=in_host),
        params,
        grad_accumulators,
        Microbatches(
            batch,
            config.train.gradient_accumulation_steps * model.n_slices,
            jax.random.fold_in(jax.random.key(config.train.seed), step),
        ),
    )
    if not in_host:  # offloaded gradients were divided and reduced in the backward pass
        gradients = jax.tree.map(lambda g: g / weight_sum, gradients)
        gradients = reduce_gradients(gradients, model.layouts)
    rows = parts.rows | parts.aux
    return jax.tree.map(lambda own_B: gather_batch(own_B, model.mesh), rows), gradients
