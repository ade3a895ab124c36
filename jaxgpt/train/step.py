"""One training step, and the compiled functions of a run around it."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from jaxgpt.config import Config
from jaxgpt.models.attention import (
    Attention,
    choose_attention,
    cuda_capability,
    fallback_warnings,
    make_attention,
)
from jaxgpt.models.kv_cache import Caches, empty_caches, unstack_layers
from jaxgpt.models.transformer import GPT
from jaxgpt.models.weights import count_parameters, weights
from jaxgpt.optim import learning_rate_schedule
from jaxgpt.parallel import sharding
from jaxgpt.parallel.sharding import Params
from jaxgpt.spikes.detector import detect_and_gate
from jaxgpt.train.gradients import ShardedModel, shard_model
from jaxgpt.train.microslices import choose_n_slices
from jaxgpt.train.state import (
    CPU_INIT_OPTIONS,
    DecodeFn,
    StepFunctions,
    TrainState,
    init_state,
    optimizer_of,
    state_shapes,
    step_options,
    training_batch,
)
from jaxgpt.train.step_metrics import Metrics, StepValues, logit_metrics, step_scalars

# (params, opt_state) -> the same after an update.
Update = Callable[[Params, Any], tuple[Params, Any]]

SMALL_BYTES = 2**28  # of parameters: up to this size, all devices gather them to write samples


class StepParts(NamedTuple):
    """What a step is made of."""

    config: Config
    model: ShardedModel
    optimizer: optax.GradientTransformation
    schedule: optax.Schedule
    opt_state_on_device: Any
    """Shardings that opt_state is brought to for the update; None where it lies so already."""
    gate: Callable[..., Any]
    """`gate_by_where` or `gate_in_turn`."""


def train_step(
    parts: StepParts, state: TrainState, step: jax.Array, batch: jax.Array
) -> tuple[TrainState, Metrics]:
    """Return the state after a step, and what the step measured. A pure function.

    A step that is not finite, or that spike.action=skip_update leaves out, changes no bit of the
    parameters and the optimizer's state.

    Args:
        step: its number, from 1.
        batch: token ids (B, T+1).
    """
    config = parts.config
    row_losses, gradients, from_logits = parts.model.loss_and_gradients(state.params, step, batch)
    loss, grad_norm = row_losses.mean(), optax.tree.norm(gradients)
    lr = jnp.asarray(parts.schedule(step), jnp.float32)
    spike_state, detection, update_is_due = detect_and_gate(
        config.spike, state.spike_state, loss, grad_norm
    )
    values = StepValues(loss, grad_norm, lr, row_losses, gradients, state.params)
    opt_state = state.opt_state
    if parts.opt_state_on_device is not None:
        opt_state = jax.device_put(opt_state, parts.opt_state_on_device)

    def update(params: Params, opt_state: optax.OptState) -> tuple[Params, optax.OptState]:
        clipped = clip_by_norm(gradients, grad_norm, config.optimizer.grad_clip)
        directions, opt_state = parts.optimizer.update(clipped, opt_state, params)
        return jax.tree.map(lambda p, u: p - lr * u, params, directions), opt_state

    params, opt_state = parts.gate(update_is_due, update, state.params, opt_state)
    metrics = Metrics(step_scalars(values, from_logits), row_losses, detection)
    return TrainState(params, opt_state, spike_state), metrics


# Each is taken where XLA makes no other copy of the state for it. Temporaries of a step of gpt2
# with 4 layers on one device, beside a step without a gate (JAX 0.10.2, 2026-11): for a CPU
# `gate_by_where` takes 216 MB more and `gate_in_turn` none; for an H100 they take 0.1 and 53 MB
# more (`jax.lax.cond` 782 MB).


def gate_by_where(is_due: jax.Array | None, update: Update, *old: Any) -> tuple[Params, Any]:
    """Return `update(*old)` if it is due, else `old`, bit for bit; None is always due."""
    new = update(*old)
    # Chosen, never multiplied by zero: 0 x NaN is NaN.
    return new if is_due is None else jax.tree.map(functools.partial(jnp.where, is_due), new, old)


def gate_in_turn(is_due: jax.Array | None, update: Update, *old: Any) -> tuple[Params, Any]:
    """The same, the parameters before the optimizer's state, which is computed twice."""
    if is_due is None:
        return update(*old)
    choose, (params, opt_state) = functools.partial(jnp.where, is_due), old
    new_params = jax.tree.map(choose, update(params, opt_state)[0], params)
    new_params, opt_state = jax.lax.optimization_barrier((new_params, opt_state))
    return new_params, jax.tree.map(choose, update(params, opt_state)[1], opt_state)


def clip_by_norm(gradients: Params, norm: jax.Array, limit: float) -> Params:
    """Return gradients scaled down to the global norm `limit` if theirs, `norm`, is above it.

    As optax.clip_by_global_norm, which would compute the norm over all devices once more.

    Args:
        limit: 0 does not clip.
    """
    if limit == 0:
        return gradients
    scale = jnp.where(norm < limit, 1.0, limit / norm)
    return jax.tree.map(lambda g: g * scale, gradients)


def make_steps(
    config: Config,
    mesh: Mesh,
    attend: Attention | None = None,
    slices: int | None = None,
    on_cpu: bool | None = None,
) -> StepFunctions:
    """Build the functions of a run; nothing is computed yet.

    Args:
        config: with model.vocab_size set.
        attend: the attention function; None takes the best that runs on these devices.
        slices: into how many slices a device cuts its rows of a microbatch; None cuts them on CPUs.
        on_cpu: use the kernels for CPUs; None asks the devices.

    Raises:
        UsageError: if model.attention or optimizer.name cannot be had.
    """
    model, train = config.model, config.train
    device = mesh.devices.flat[0]
    on_cpu = device.platform == "cpu" if on_cpu is None else on_cpu
    capability = cuda_capability(device)
    kernel, reason = choose_attention(model, train.dtype, capability)
    attend = attend or make_attention(kernel, model.dropout)
    if slices is None:
        slices = choose_n_slices(config, mesh) if on_cpu else 1
    sharded = shard_model(config, mesh, attend, slices, on_cpu, logit_metrics())
    state, batch = state_shapes(config, mesh), training_batch(config, sharding.batch_sharding(mesh))
    state_at = jax.tree.map(lambda leaf: leaf.sharding, state)
    whole = sharding.replicated(mesh)
    parts = make_step_parts(sharded, state_at.opt_state)
    return StepFunctions(
        mesh=mesh,
        attention=f"{kernel} ({reason})",
        n_parameters=count_parameters(model),
        warnings=(
            *fallback_warnings(model, kernel, reason, capability),
            *undivided_dims_warnings(config, mesh),
        ),
        batch_shape=batch,
        state_shapes=state,
        init=jax.jit(
            functools.partial(init_state, config),
            out_shardings=state_at,
            compiler_options=CPU_INIT_OPTIONS if on_cpu else None,
        ),
        train_step=jax.jit(
            functools.partial(train_step, parts),
            in_shardings=(state_at, whole, batch.sharding),
            out_shardings=(state_at, whole),
            donate_argnums=0,
            compiler_options=step_options(device.platform, mesh.size),
        ),
        eval_step=jax.jit(
            sharded.eval_losses,
            in_shardings=(state_at.params, batch.sharding),
            out_shardings=whole,
        ),
        make_decoder=functools.partial(make_decoder, sharded, attend, on_cpu),
    )


def make_step_parts(sharded: ShardedModel, opt_state_at: Any) -> StepParts:
    """Return what a step is made of, given the shardings of opt_state between steps."""
    config, on_device = sharded.config, None
    if config.parallel.offload_optimizer:
        on_device = jax.tree.map(lambda s: s.with_memory_kind("device"), opt_state_at)
    is_cpu = sharded.mesh.devices.flat[0].platform == "cpu"
    return StepParts(
        config,
        sharded,
        optimizer_of(config),
        learning_rate_schedule(config.optimizer),
        on_device,
        gate_in_turn if is_cpu else gate_by_where,
    )


def undivided_dims_warnings(config: Config, mesh: Mesh) -> tuple[str, ...]:
    """Return a sentence for each kind of dim of a parameter that the mesh does not divide."""
    rules = sharding.parameter_rules(config.parallel.zero_stage)
    return sharding.undivided_dims_warnings(weights(config.model), rules, mesh)


def make_decoder(
    sharded: ShardedModel, attend: Attention, on_cpu: bool, params: Params
) -> tuple[DecodeFn, Caches]:
    """Return the decode function of these parameters, and empty KV caches.

    Decoding one token is too little work to share: every device gathers weights that are small,
    and decodes alone. A CPU decodes a large model fastest with each layer's weights apart.
    """
    model, mesh = sharded.config.model, sharded.mesh
    sizes = jax.tree.leaves(jax.tree.map(lambda p: p.size * p.dtype.itemsize, params))
    is_large = sum(sizes) > SMALL_BYTES
    unstacked = is_large and on_cpu and mesh.size == 1
    dtype = jnp.dtype(sharded.config.train.dtype)
    caches = empty_caches(model, dtype, scan_layers=not unstacked)
    if is_large and mesh.size > 1:
        return functools.partial(sharded.decode, params), caches
    network = functools.partial(GPT, model, dtype=dtype, attend=attend, scan_layers=not unstacked)
    graph = nnx.graphdef(nnx.eval_shape(lambda: network(rngs=nnx.Rngs(0))))
    params = jax.lax.with_sharding_constraint(params, sharding.replicated(mesh))
    if unstacked:
        params = unstack_layers(params)
    return lambda *operands: nnx.merge(graph, params).decode_step(*operands), caches
