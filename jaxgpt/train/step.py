"""One training step, as a pure function: the loss and its gradient on a mesh, and the update."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxgpt.config import Config
from jaxgpt.models.loss import LogitMetrics, cross_entropy_sum
from jaxgpt.models.weights import weights
from jaxgpt.optim import Parameters, learning_rate_schedule, make_optimizer
from jaxgpt.optim.update import clip_by_norm, gated_update, global_norm
from jaxgpt.parallel.collectives import gather_rows
from jaxgpt.parallel.mesh import mesh_axes_with
from jaxgpt.parallel.sharding import Params, batch_sharding
from jaxgpt.parallel.tensor import ParallelContext
from jaxgpt.parallel.zero import ShardedParam, local_params, reduce_gradients
from jaxgpt.spikes.detector import detect_and_gate
from jaxgpt.spikes.faults import inject_nan
from jaxgpt.train.reporting.step_metrics import Metrics, StepValues, step_scalars
from jaxgpt.train.state import TrainState


class ShardedModel(NamedTuple):
    """The network on a mesh, built by `functions.shard_model`."""

    config: Config  # with model.vocab_size set
    mesh: Mesh
    layouts: Any  # `ParamLayout` of every parameter: where it and its gradient lie
    context: ParallelContext
    graph: nnx.GraphDef  # the network without parameters
    n_slices: int  # number of slices that each device cuts its rows of a microbatch into
    logit_metrics: LogitMetrics

    @property
    def param_specs(self) -> Any:
        """The `PartitionSpec` of every parameter between steps."""
        return jax.tree.map(lambda layout: layout.param, self.layouts)

    @property
    def parameters(self) -> Parameters:
        """Weights, and where their gradients lie, for the optimizer."""
        shardings = jax.tree.map(lambda one: NamedSharding(self.mesh, one.grad), self.layouts)
        return Parameters(weights(self.config.model), shardings)


def train_step(
    model: ShardedModel, state: TrainState, step: jax.Array, batch: jax.Array
) -> tuple[TrainState, Metrics]:
    """Return the state after a step, and what the step measured. A pure function.

    An update that `detect_and_gate` finds not due, as of a step that is not finite, changes no bit
    of the parameters and the optimizer's state.

    Args:
        step: its number, from 1.
        batch: token ids (B, T+1).
    """
    config = model.config
    row_losses, gradients, from_logits = loss_and_gradients(model, state.params, step, batch)
    loss, grad_norm = row_losses.mean(), global_norm(gradients)
    lr = jnp.asarray(learning_rate_schedule(config.optimizer)(step), jnp.float32)
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
    values = StepValues(loss, grad_norm, lr, row_losses, gradients, state.params)
    metrics = Metrics(step_scalars(values, from_logits), row_losses, detection)
    return TrainState(params, opt_state, spike_state), metrics


def loss_and_gradients(
    model: ShardedModel, params: Params, step: jax.Array, rows: jax.Array
) -> tuple[jax.Array, Params, dict[str, jax.Array]]:
    """Return mean losses (B,) of rows (B, T+1), the gradient of their mean, the logit metrics."""
    batch, everywhere = batch_sharding(model.mesh).spec, PartitionSpec()
    grad_specs = jax.tree.map(lambda layout: layout.grad, model.layouts)
    return jax.shard_map(
        functools.partial(_local_loss_and_gradients, model),
        mesh=model.mesh,
        in_specs=(model.param_specs, everywhere, batch, PartitionSpec(batch[0])),
        out_specs=(everywhere, grad_specs, everywhere),
    )(params, step, rows, jnp.arange(rows.shape[0]))


# What one device computes from its part of everything, inside `jax.shard_map`.


def _local_loss_and_gradients(
    model: ShardedModel, params: Params, step: jax.Array, rows: jax.Array, row_numbers: jax.Array
) -> tuple[jax.Array, Params, dict[str, jax.Array]]:
    """Compute `loss_and_gradients`; dropout depends on a row's number in the whole batch."""
    train, mesh = model.config.train, model.mesh
    params, zeros = local_params(params, model.layouts)
    key = jax.random.fold_in(jax.random.key(train.seed), step)
    keys_B = jax.vmap(lambda row: jax.random.fold_in(key, row))(row_numbers)
    (sums_B, metrics), gradients = _accumulate_gradients(model, zeros, params, step, rows, keys_B)
    if model.config.parallel.offload != "state":
        n_devices = math.prod(mesh.shape[axis] for axis in mesh_axes_with("splits_batch", mesh))
        n_tokens = rows[:, 1:].size * n_devices
        gradients = jax.tree.map(lambda g: g / n_tokens, gradients)
        gradients = reduce_gradients(gradients, model.layouts)
    metrics = {
        name: metric.reduce_over_devices(metrics[name], mesh)
        for name, metric in model.logit_metrics.items()
    }
    return gather_rows(sums_B, mesh) / (rows.shape[1] - 1), gradients, metrics


def _accumulate_gradients(
    model: ShardedModel,
    zeros: Any,
    params: Params,
    step: jax.Array,
    rows: jax.Array,
    keys_B: jax.Array,
) -> tuple[tuple[jax.Array, dict[str, jax.Array]], Params]:
    """Return ((summed loss of each row, logit metrics), the gradient summed over all rows).

    Microbatches, and slices of them, are computed one after the other; number i of n holds the
    rows i, i + n, ... of each device, hence of the global batch.
    """
    n = model.config.train.gradient_accumulation_steps * model.n_slices

    def objective(*operands: Any) -> tuple[jax.Array, Any]:
        loss, aux = local_loss(model, *operands)
        return inject_nan(model.config, loss, model.mesh, step), aux

    value_and_grad = jax.value_and_grad(objective, has_aux=True)
    if n == 1:
        (_, aux), gradients = value_and_grad(zeros, params, rows, keys_B)
        return aux, gradients

    def add(total: Params, microbatch: tuple[jax.Array, jax.Array]) -> tuple[Params, Any]:
        # The barrier keeps XLA from gathering all weights of ZeRO-3 once, before the loop.
        here = jax.tree.map(
            lambda param: jax.lax.optimization_barrier((param, microbatch[0]))[0], params
        )
        if model.config.parallel.offload == "state":  # where the backward pass adds to the total
            (_, aux), total = value_and_grad(total, here, *microbatch)
            return total, aux
        (_, aux), gradients = value_and_grad(zeros, here, *microbatch)
        return jax.tree.map(jnp.add, total, gradients), aux

    parts = split_microbatches(rows, n), split_microbatches(keys_B, n)
    gradients, (losses, metrics) = jax.lax.scan(add, zeros, parts)
    metrics = {name: m.reduce(metrics[name]) for name, m in model.logit_metrics.items()}
    return (merge_microbatches(losses), metrics), gradients


def local_loss(
    model: ShardedModel,
    zeros: Params,
    params: Params,
    rows: jax.Array,
    keys_B: jax.Array | None = None,
) -> tuple[jax.Array, tuple[jax.Array, dict[str, jax.Array]]]:
    """Return the summed loss, to be differentiated by `zeros`, and (sums of rows, logit metrics).

    `keys_B` has a dropout key for each row; without, nothing is dropped.
    """
    x_BTD, w_VD, vocab_offset = hidden_states(model, zeros, params, rows[:, :-1], keys_B)
    return cross_entropy_sum(
        x_BTD,
        w_VD,
        rows[:, 1:],
        vocab_offset,
        model.config.model,
        model.context,
        model.config.train.loss_chunk,
        model.logit_metrics,
    )


def hidden_states(
    model: ShardedModel,
    zeros: Params,
    params: Params,
    tokens_BT: jax.Array,
    keys_B: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, Any]:
    """Return the operands of the output layer, as `GPT.hidden_states`, of this device's rows."""
    sharded = jax.tree.map(ShardedParam, params, zeros, model.layouts)
    return nnx.merge(model.graph, sharded).hidden_states(tokens_BT, keys_B)


def split_microbatches(x: jax.Array, n_parts: int) -> jax.Array:
    """Split (B, ...) into (n_parts, B / n_parts, ...): part i holds rows i, i + n_parts, ..."""
    return x.reshape(x.shape[0] // n_parts, n_parts, *x.shape[1:]).swapaxes(0, 1)


def merge_microbatches(x: jax.Array) -> jax.Array:
    """Merge (n_parts, B / n_parts, ...) to (B, ...), in the order before `split_microbatches`."""
    return x.swapaxes(0, 1).reshape(-1, *x.shape[2:])
