"""The compiled functions of a run: initial state, one training step, one evaluation step.

Pure functions over pytrees, each jitted once. What a run carries from step to step is a
`TrainState`; the number of the step is passed in beside it.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from jaxgpt.config import Config
from jaxgpt.distributed import partition
from jaxgpt.model.attention import choose_attention, cuda_capability, make_attention
from jaxgpt.model.gpt import GPT, Params, abstract_params
from jaxgpt.training.optimizer import learning_rate_schedule, make_optimizer

GATHERED_BYTES = 2**28  # parameters up to this size are gathered to write samples


class TrainState(NamedTuple):
    """Everything that a step changes."""

    params: Params
    opt_state: optax.OptState


class Metrics(NamedTuple):
    """What a step reports: float32 scalars on the device."""

    loss: jax.Array
    """Mean cross-entropy over all tokens of the global batch, in nats."""
    grad_norm: jax.Array
    """Global norm of the gradient, before clipping."""
    lr: jax.Array


@dataclass(frozen=True)
class Steps:
    """The compiled functions, and where their state lives."""

    mesh: Mesh
    attention: str
    """Which attention kernel runs, and why."""
    warnings: tuple[str, ...]
    """What of the layout is not as asked for."""
    batch_sharding: NamedSharding
    replicated: NamedSharding
    state_shapes: TrainState
    """`jax.ShapeDtypeStruct`s with their shardings: what a checkpoint is restored into."""
    init: Callable[[], TrainState]
    train_step: Callable[[TrainState, int, jax.Array], tuple[TrainState, Metrics]]
    """(state, step, tokens of shape (B, T+1)) -> (next state, metrics); donates the state."""
    eval_step: Callable[[Params, jax.Array], jax.Array]
    """(params, tokens of shape (B, T+1)) -> mean loss."""
    sample_logits: Callable[[Params, jax.Array], jax.Array]
    """(params, tokens_BT) -> logits_BTV over the padded vocabulary, for few rows at a time."""


def make_steps(config: Config, mesh: Mesh) -> Steps:
    """Builds the functions of a run; nothing is computed yet.

    Args:
        config: with model.vocab_size set.
    """
    model, train = config.model, config.train
    device = mesh.devices.flat[0]
    on_cpu = device.platform == "cpu"
    kernel, reason = choose_attention(model, train.dtype, cuda_capability(device))
    network = functools.partial(
        GPT,
        model,
        dtype=jnp.dtype(train.dtype),
        attend=make_attention(kernel, model.dropout),
        scan_layers=config.parallel.scan_layers,
    )
    lone_graph = nnx.graphdef(nnx.eval_shape(lambda: network(rngs=nnx.Rngs(0))))
    network = functools.partial(
        network,
        constrain=partition.activation_constraint(mesh),
        gather_again=config.parallel.zero_stage == 3 and mesh.shape["fsdp"] > 1,
    )
    graph = nnx.graphdef(nnx.eval_shape(lambda: network(rngs=nnx.Rngs(0))))
    optimizer = make_optimizer(config.optimizer)
    schedule = learning_rate_schedule(config.optimizer)

    # Where everything lives.
    shapes, axes = abstract_params(model)
    stage = config.parallel.zero_stage
    live_in = functools.partial(partition.shardings, axes, shapes, mesh=mesh)
    gradient_sharding = live_in(partition.gradient_rules(stage))
    moment_sharding = live_in(partition.moment_rules(stage))
    whole = partition.replicated(mesh)
    state_sharding = TrainState(
        params=live_in(partition.parameter_rules(stage)),
        opt_state=optax.tree_utils.tree_map_params(
            optimizer,
            lambda _, sharding: sharding,
            jax.eval_shape(optimizer.init, shapes),
            moment_sharding,
            transform_non_params=lambda _: whole,
        ),
    )
    batch_sharding = partition.batch_sharding(mesh)

    def init() -> TrainState:
        params = nnx.to_pure_dict(nnx.state(network(rngs=nnx.Rngs(params=train.seed)), nnx.Param))
        return TrainState(params, optimizer.init(params))

    def logits(params: Params, tokens_BT: jax.Array, key: jax.Array | None = None) -> jax.Array:
        return nnx.merge(graph, params)(tokens_BT, key)

    def loss(params: Params, rows: jax.Array, key: jax.Array | None = None) -> jax.Array:
        return cross_entropy(logits(params, rows[:, :-1], key), rows[:, 1:]).mean()

    def train_step(
        state: TrainState, step: jax.Array, batch: jax.Array
    ) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(jax.random.key(train.seed), step)
        value, grads = accumulated_gradients(
            loss, state.params, batch, key, train.gradient_accumulation_steps
        )
        grads = jax.lax.with_sharding_constraint(grads, gradient_sharding)
        grad_norm = optax.tree.norm(grads)
        directions, opt_state = optimizer.update(grads, state.opt_state, state.params)
        lr = jnp.asarray(schedule(step), jnp.float32)
        params = jax.tree.map(lambda p, d: p - lr * d, state.params, directions)
        return TrainState(params, opt_state), Metrics(value, grad_norm, lr)

    def sample_logits(params: Params, tokens_BT: jax.Array) -> jax.Array:
        """Writing one token is too little work to share: with weights that fit, all do all."""
        if sum(s.size * s.dtype.itemsize for s in jax.tree.leaves(shapes)) > GATHERED_BYTES:
            return logits(params, tokens_BT)
        params = jax.lax.with_sharding_constraint(params, whole)
        return nnx.merge(lone_graph, params)(tokens_BT)

    return Steps(
        mesh=mesh,
        attention=f"{kernel} ({reason})",
        warnings=partition.unsplit(axes, shapes, partition.parameter_rules(stage), mesh),
        batch_sharding=batch_sharding,
        replicated=whole,
        state_shapes=jax.tree.map(
            lambda s, where: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=where),
            jax.eval_shape(init),
            state_sharding,
        ),
        init=jax.jit(
            init,
            out_shardings=state_sharding,
            # It runs once: on a CPU, LLVM's costlier passes take longer than they save.
            compiler_options={"xla_backend_optimization_level": 1} if on_cpu else None,
        ),
        train_step=jax.jit(
            train_step,
            in_shardings=(state_sharding, whole, batch_sharding),
            out_shardings=(state_sharding, whole),
            donate_argnums=0,
        ),
        eval_step=jax.jit(
            loss, in_shardings=(state_sharding.params, batch_sharding), out_shardings=whole
        ),
        sample_logits=sample_logits,
    )


def cross_entropy(logits_BTV: jax.Array, targets_BT: jax.Array) -> jax.Array:
    """-log softmax(logits)[target] in nats, shape (B, T).

    The target's logit is picked by a comparison, not an index, so that a vocabulary split over
    devices is summed where it lives.
    """
    is_target_BTV = jnp.arange(logits_BTV.shape[-1]) == targets_BT[..., None]
    target_BT = jnp.sum(jnp.where(is_target_BTV, logits_BTV, 0.0), axis=-1)
    return jax.nn.logsumexp(logits_BTV, axis=-1) - target_BT


def accumulated_gradients(
    loss: Callable[..., jax.Array], params: Params, batch: jax.Array, key: jax.Array, parts: int
) -> tuple[jax.Array, Any]:
    """Mean loss and its gradient over a global batch, computed in `parts` microbatches.

    Microbatch i holds the rows i, i + parts, ...: every device has an equal share of each.
    """
    value_and_grad = jax.value_and_grad(loss)
    if parts == 1:
        return value_and_grad(params, batch, key)
    rows, length = batch.shape
    microbatches = batch.reshape(rows // parts, parts, length).swapaxes(0, 1)

    def add(total, microbatch_and_key):
        return jax.tree.map(jnp.add, total, value_and_grad(params, *microbatch_and_key)), None

    zeros = jax.tree.map(jnp.zeros_like, (jnp.float32(0), params))
    total, _ = jax.lax.scan(add, zeros, (microbatches, jax.random.split(key, parts)))
    return jax.tree.map(lambda t: t / parts, total)
