"""One training step, as a pure function: the loss and its gradient on a mesh, and the update."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxgpt.config import Config
from jaxgpt.models.loss import cross_entropy_sum
from jaxgpt.models.weights import weights
from jaxgpt.optim import make_optimizer
from jaxgpt.optim.parameters import Parameters
from jaxgpt.optim.update import clip_by_norm, gated_update, global_norm
from jaxgpt.parallel.collectives import gather_rows
from jaxgpt.parallel.mesh import mesh_axes_with
from jaxgpt.parallel.sharding import Params, batch_sharding
from jaxgpt.parallel.tensor import ParallelContext
from jaxgpt.parallel.zero import ShardedParam, local_params, reduce_gradients
from jaxgpt.spikes.detector import Detection, detect_and_gate
from jaxgpt.spikes.faults import inject_nan
from jaxgpt.tracking.figures import Figure
from jaxgpt.train.state import TrainState


class ShardedModel(NamedTuple):
    """The network on a mesh, built by `functions.shard_model`."""

    config: Config  # with model.vocab_size set
    mesh: Mesh
    layouts: Any  # `ParamLayout` of every parameter: where it and its gradient lie
    context: ParallelContext
    graph: nnx.GraphDef  # the network without parameters
    n_slices: int  # number of slices that each device cuts its rows of a microbatch into

    @property
    def param_specs(self) -> Any:
        """The `PartitionSpec` of every parameter between steps."""
        return jax.tree.map(lambda layout: layout.param, self.layouts)

    @property
    def parameters(self) -> Parameters:
        """Weights, and where their gradients lie, for the optimizer."""
        shardings = jax.tree.map(lambda one: NamedSharding(self.mesh, one.grad), self.layouts)
        return Parameters(weights(self.config.model), shardings)


class StepValues(NamedTuple):
    """Values that a metric can be computed from, on the device; the arrays are whole."""

    loss: jax.Array  # mean cross-entropy of the global batch, nats per token: float32 scalar
    grad_norm: jax.Array  # global norm of the gradient before clipping: float32 scalar
    lr: jax.Array  # learning rate: float32 scalar
    rows: dict[str, jax.Array]  # auxiliary values of the loss: float32 (B,), by name
    gradients: Params  # before clipping
    params: Params  # before the update


class Metric(NamedTuple):
    """A float32 scalar of a step, replicated on every device."""

    figure: Figure
    compute: Callable[[StepValues], jax.Array]


# All metrics of a step: a line added here reaches the console, metrics.jsonl and every tracker.
STEP_METRICS = {
    "loss": Metric(
        Figure("mean cross-entropy, nats per token", rank=0, show="{:.4f}".format),
        lambda values: values.loss,
    ),
    "grad_norm": Metric(
        Figure("global norm of the unclipped gradient", "gnorm", rank=3, show="{:.3f}".format),
        lambda values: values.grad_norm,
    ),
    "lr": Metric(Figure("learning rate", rank=6, show="{:.3g}".format), lambda values: values.lr),
}


class Metrics(NamedTuple):
    """Results of a step, besides the new state."""

    scalars: dict[str, jax.Array]  # the value of each of `STEP_METRICS`
    row_losses: jax.Array  # mean loss of each row of the global batch, in its order: float32 (B,)
    detection: Detection

    @property
    def loss(self) -> jax.Array:
        """Mean cross-entropy over all tokens of the global batch, in nats."""
        return self.scalars["loss"]


def train_step(
    model: ShardedModel, state: TrainState, step: jax.Array, lr: jax.Array, batch: jax.Array
) -> tuple[TrainState, Metrics]:
    """Return the state after a step, and what the step measured. A pure function.

    An update that `detect_and_gate` finds not due, as of a step that is not finite, changes no bit
    of the parameters and the optimizer's state.

    Args:
        step: its number, from 1.
        lr: the learning rate of the step: `optim.schedule.learning_rate`.
        batch: token ids (B, T+1).
    """
    config = model.config
    rows, gradients = loss_and_gradients(model, state.params, step, batch)
    row_losses = rows["loss"] / (batch.shape[1] - 1)
    loss, grad_norm = row_losses.mean(), global_norm(gradients)
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
    return TrainState(params, opt_state, spike_state), Metrics(scalars, row_losses, detection)


def loss_and_gradients(
    model: ShardedModel, params: Params, step: jax.Array, rows: jax.Array
) -> tuple[dict[str, jax.Array], Params]:
    """Return auxiliary values (B,) of rows (B, T+1), and the gradient of the mean loss.

    The auxiliary values are those of `cross_entropy_sum`: `loss` is summed over each row's tokens.
    """
    batch, everywhere = batch_sharding(model.mesh).spec, PartitionSpec()
    grad_specs = jax.tree.map(lambda layout: layout.grad, model.layouts)
    return jax.shard_map(
        functools.partial(_local_loss_and_gradients, model),
        mesh=model.mesh,
        in_specs=(model.param_specs, everywhere, batch, PartitionSpec(batch[0])),
        out_specs=(everywhere, grad_specs),
    )(params, step, rows, jnp.arange(rows.shape[0]))


# What one device computes from its part of everything, inside `jax.shard_map`.


def _local_loss_and_gradients(
    model: ShardedModel, params: Params, step: jax.Array, rows: jax.Array, row_numbers: jax.Array
) -> tuple[dict[str, jax.Array], Params]:
    """Compute `loss_and_gradients`; dropout depends on a row's number in the whole batch."""
    train, mesh = model.config.train, model.mesh
    params, zeros = local_params(params, model.layouts)
    key = jax.random.fold_in(jax.random.key(train.seed), step)
    keys_B = jax.vmap(lambda row: jax.random.fold_in(key, row))(row_numbers)
    values, gradients = _accumulate_gradients(model, zeros, params, step, rows, keys_B)
    if model.config.parallel.offload != "state":
        n_devices = math.prod(mesh.shape[axis] for axis in mesh_axes_with("splits_batch", mesh))
        n_tokens = rows[:, 1:].size * n_devices
        gradients = jax.tree.map(lambda g: g / n_tokens, gradients)
        gradients = reduce_gradients(gradients, model.layouts)
    return jax.tree.map(lambda own_B: gather_rows(own_B, mesh), values), gradients


def _accumulate_gradients(
    model: ShardedModel,
    zeros: Any,
    params: Params,
    step: jax.Array,
    rows: jax.Array,
    keys_B: jax.Array,
) -> tuple[dict[str, jax.Array], Params]:
    """Return the auxiliary values of each row, and the gradient summed over all rows.

    Microbatches, and slices of them, are computed one after the other; number i of n holds the
    rows i, i + n, ... of each device, hence of the global batch.
    """
    n = model.config.train.gradient_accumulation_steps * model.n_slices

    def objective(*operands: Any) -> tuple[jax.Array, Any]:
        loss, values = local_loss(model, *operands)
        return inject_nan(model.config, loss, model.mesh, step), values

    value_and_grad = jax.value_and_grad(objective, has_aux=True)
    if n == 1:
        (_, values), gradients = value_and_grad(zeros, params, rows, keys_B)
        return values, gradients

    def add(total: Params, microbatch: tuple[jax.Array, jax.Array]) -> tuple[Params, Any]:
        # The barrier keeps XLA from gathering all weights of ZeRO-3 once, before the loop.
        here = jax.tree.map(
            lambda param: jax.lax.optimization_barrier((param, microbatch[0]))[0], params
        )
        if model.config.parallel.offload == "state":  # where the backward pass adds to the total
            (_, values), total = value_and_grad(total, here, *microbatch)
            return total, values
        (_, values), gradients = value_and_grad(zeros, here, *microbatch)
        return jax.tree.map(jnp.add, total, gradients), values

    parts = split_microbatches(rows, n), split_microbatches(keys_B, n)
    gradients, values = jax.lax.scan(add, zeros, parts)
    return jax.tree.map(merge_microbatches, values), gradients


def local_loss(
    model: ShardedModel,
    zeros: Params,
    params: Params,
    rows: jax.Array,
    keys_B: jax.Array | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return the summed loss, to be differentiated by `zeros`, and auxiliary values of each row.

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
