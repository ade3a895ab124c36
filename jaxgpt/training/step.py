"""The compiled functions of a run: initial state, one training step, one evaluation step.

Pure functions over pytrees, each jitted once. What a run carries from step to step is a
`TrainState`; the number of the step is passed in beside it.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from jaxgpt.config import Config
from jaxgpt.distributed import partition
from jaxgpt.model.attention import (
    Attention,
    choose_attention,
    cuda_capability,
    make_attention,
)
from jaxgpt.model.gpt import GPT, Params, abstract_params
from jaxgpt.training.optimizer import clip, learning_rate_schedule, make_optimizer
from jaxgpt.training.sharded import make_sharded

GATHERED_BYTES = 2**28  # parameters up to this size are gathered to write samples

# What a layer computes twice to save memory, XLA's CPU compiler computes once and keeps, unless
# it leaves in place the barriers that jax.checkpoint puts between the two.
CPU_STEP_OPTIONS = {"xla_disable_hlo_passes": "cse_barrier_expander"}
# It runs once: on a CPU, LLVM's costlier passes take longer than they save.
CPU_INIT_OPTIONS = {"xla_backend_optimization_level": 1}


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


def make_steps(config: Config, mesh: Mesh, attend: Attention | None = None) -> Steps:
    """Builds the functions of a run; nothing is computed yet.

    Args:
        config: with model.vocab_size set.
        attend: the attention function; None takes the best that runs on these devices.
    """
    model, train, parallel = config.model, config.train, config.parallel
    device = mesh.devices.flat[0]
    on_cpu = device.platform == "cpu"
    kernel, reason = choose_attention(model, train.dtype, cuda_capability(device))
    attend = attend or make_attention(kernel, model.dropout)
    optimizer = make_optimizer(config.optimizer)
    schedule = learning_rate_schedule(config.optimizer)
    sharded = make_sharded(config, mesh, attend)

    # Where everything lives.
    shapes, axes = abstract_params(model)
    whole = partition.replicated(mesh)
    batch_sharding = partition.batch_sharding(mesh)

    def state_sharding(memory_kind: str | None) -> TrainState:
        opt_state = optax.tree_utils.tree_map_params(
            optimizer,
            lambda _, sharding: sharding,
            jax.eval_shape(optimizer.init, shapes),
            partition.shardings(sharded.updated, mesh, memory_kind),
            transform_non_params=lambda _: whole,
        )
        return TrainState(partition.shardings(sharded.stored, mesh), opt_state)

    on_device = state_sharding(None)
    at_rest = state_sharding("pinned_host") if parallel.offload_optimizer else on_device

    def init() -> TrainState:
        network = GPT(model, rngs=nnx.Rngs(params=train.seed))
        params = nnx.to_pure_dict(nnx.state(network, nnx.Param))
        return TrainState(params, optimizer.init(params))

    def train_step(
        state: TrainState, step: jax.Array, batch: jax.Array
    ) -> tuple[TrainState, Metrics]:
        loss, gradients = sharded.loss_and_gradients(state.params, step, batch)
        params, opt_state = state
        if parallel.offload_optimizer:
            opt_state = jax.device_put(opt_state, on_device.opt_state)
        grad_norm = optax.tree.norm(gradients)
        gradients = clip(gradients, grad_norm, config.optimizer.grad_clip)
        directions, opt_state = optimizer.update(gradients, opt_state, params)
        lr = jnp.asarray(schedule(step), jnp.float32)
        params = jax.tree.map(lambda p, d: p - lr * d, params, directions)
        return TrainState(params, opt_state), Metrics(loss, grad_norm, lr)

    lone = functools.partial(
        GPT, model, dtype=jnp.dtype(train.dtype), attend=attend, scan_layers=parallel.scan_layers
    )
    lone_graph = nnx.graphdef(nnx.eval_shape(lambda: lone(rngs=nnx.Rngs(0))))

    def sample_logits(params: Params, tokens_BT: jax.Array) -> jax.Array:
        """Writing one token is too little work to share: with weights that fit, all do all."""
        if sum(s.size * s.dtype.itemsize for s in jax.tree.leaves(shapes)) > GATHERED_BYTES:
            return sharded.logits(params, tokens_BT)
        params = jax.lax.with_sharding_constraint(params, whole)
        return nnx.merge(lone_graph, params)(tokens_BT)

    return Steps(
        mesh=mesh,
        attention=f"{kernel} ({reason})",
        warnings=partition.unsplit(
            axes, shapes, partition.parameter_rules(parallel.zero_stage), mesh
        ),
        batch_sharding=batch_sharding,
        replicated=whole,
        state_shapes=jax.tree.map(
            lambda s, where: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=where),
            jax.eval_shape(init),
            at_rest,
        ),
        init=jax.jit(
            init,
            out_shardings=at_rest,
            compiler_options=CPU_INIT_OPTIONS if on_cpu else None,
        ),
        train_step=jax.jit(
            train_step,
            in_shardings=(at_rest, whole, batch_sharding),
            out_shardings=(at_rest, whole),
            donate_argnums=0,
            compiler_options=CPU_STEP_OPTIONS if on_cpu else None,
        ),
        eval_step=jax.jit(
            sharded.loss, in_shardings=(at_rest.params, batch_sharding), out_shardings=whole
        ),
        sample_logits=sample_logits,
    )
