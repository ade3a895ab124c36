"""The functions of a run: initial state, one training step, one evaluation step.

Pure functions over pytrees, each jitted once. What a run carries from step to step is a
`TrainState`; the number of the step is passed in beside it.
"""

import functools
from typing import Any

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
from jaxgpt.models.kv_cache import Caches, empty_caches, split_by_layer
from jaxgpt.models.transformer import GPT, abstract_params, count_parameters
from jaxgpt.optim.adamw import (
    clip,
    directions,
    init_moments,
    learning_rate_schedule,
    update_moments,
)
from jaxgpt.parallel import sharding as partition
from jaxgpt.parallel.sharding import Params
from jaxgpt.spikes.detector import (
    NONE,
    NONFINITE,
    Detection,
    SpikeState,
    init_spike_state,
    look,
    no_detection,
)
from jaxgpt.train.gradients import make_sharded
from jaxgpt.train.microslices import n_slices
from jaxgpt.train.state import (
    CPU_INIT_OPTIONS,
    Metrics,
    Read,
    StepFunctions,
    TrainState,
    step_options,
    training_batch,
)

SMALL_BYTES = 2**28  # of parameters: up to this size, all devices gather them to write samples


def make_steps(
    config: Config,
    mesh: Mesh,
    attend: Attention | None = None,
    slices: int | None = None,
    on_cpu: bool | None = None,
) -> StepFunctions:
    """Builds the functions of a run; nothing is computed yet.

    Args:
        config: with model.vocab_size set.
        attend: the attention function; None takes the best that runs on these devices.
        slices: into how many parts a device cuts its rows of a microbatch; None cuts them on CPUs.
        on_cpu: whether the functions are written as CPUs compute them fastest; None asks the
            devices.
    """
    model, train, parallel = config.model, config.train, config.parallel
    device = mesh.devices.flat[0]
    if on_cpu is None:
        on_cpu = device.platform == "cpu"
    capability = cuda_capability(device)
    kernel, reason = choose_attention(model, train.dtype, capability)
    attend = attend or make_attention(kernel, model.dropout)
    schedule = learning_rate_schedule(config.optimizer)
    if slices is None:
        slices = n_slices(config, mesh) if on_cpu else 1
    sharded = make_sharded(config, mesh, attend, slices, on_cpu)

    # Where everything lives.
    shapes, axes = abstract_params(model)
    whole = partition.replicated(mesh)
    batch_sharding = partition.batch_sharding(mesh)

    def state_sharding(memory_kind: str | None) -> TrainState:
        moment = partition.shardings(sharded.updated, mesh, memory_kind)
        opt_state = {"mu": moment, "nu": moment, "count": whole}
        watch = dict.fromkeys(init_spike_state(config.spike), whole)
        return TrainState(partition.shardings(sharded.stored, mesh), opt_state, watch)

    on_device = state_sharding(None)
    at_rest = state_sharding("pinned_host") if parallel.offload_optimizer else on_device

    def init() -> TrainState:
        network = GPT(model, rngs=nnx.Rngs(params=train.seed))
        params = nnx.to_pure_dict(nnx.state(network, nnx.Param))
        return TrainState(params, init_moments(params), init_spike_state(config.spike))

    def train_step(
        state: TrainState, step: jax.Array, batch: jax.Array
    ) -> tuple[TrainState, Metrics]:
        row_losses, gradients = sharded.loss_and_gradients(state.params, step, batch)
        params, kept, watch = state
        if parallel.offload_optimizer:
            kept = jax.device_put(kept, on_device.opt_state)
        loss, grad_norm = row_losses.mean(), optax.tree.norm(gradients)
        gradients = clip(gradients, grad_norm, config.optimizer.grad_clip)
        lr = jnp.asarray(schedule(step), jnp.float32)
        watch, verdict, ok = judged(watch, loss, grad_norm)

        def if_ok(new: Any, old: Any) -> Any:
            """Chosen, never multiplied by zero: 0 x NaN is NaN."""
            return new if ok is None else jax.tree.map(functools.partial(jnp.where, ok), new, old)

        # The moments are chosen before they are used: otherwise their old and new values would
        # have to be there together, which takes another copy of both.
        kept = if_ok(update_moments(config.optimizer, kept, gradients), kept)
        updates = directions(config.optimizer, kept, params)
        params = if_ok(jax.tree.map(lambda p, u: p - lr * u, params, updates), params)
        return TrainState(params, kept, watch), Metrics(loss, grad_norm, lr, row_losses, *verdict)

    def judged(
        watch: SpikeState, loss: jax.Array, grad_norm: jax.Array
    ) -> tuple[SpikeState, Detection, Any]:
        """What is remembered, what is found, and whether to update: None is in any case."""
        if config.spike.action == "off":
            return watch, no_detection(), None
        watch, verdict = look(watch, loss, grad_norm, config.spike)
        skips_all = config.spike.action == "skip_update"
        return watch, verdict, verdict.cause == NONE if skips_all else verdict.cause != NONFINITE

    is_large = sum(s.size * s.dtype.itemsize for s in jax.tree.leaves(shapes)) > SMALL_BYTES
    # Of a small model one block is compiled and not L: texts are soon written. A CPU reads a large
    # one's weights as fast as memory yields them, if those of each layer are apart.
    apart = is_large and on_cpu and mesh.size == 1
    dtype = jnp.dtype(train.dtype)
    lone = functools.partial(GPT, model, dtype=dtype, attend=attend, scan_layers=not apart)
    lone_graph = nnx.graphdef(nnx.eval_shape(lambda: lone(rngs=nnx.Rngs(0))))

    def reader(params: Params) -> tuple[Read, Caches]:
        """StepMetrics one token is too little work to share: with weights that fit, all do all."""
        caches = empty_caches(model, dtype, scan_layers=not apart)
        if is_large and mesh.size > 1:
            return functools.partial(sharded.read, params), caches
        params = jax.lax.with_sharding_constraint(params, whole)
        if apart:
            params = split_by_layer(params)
        return lambda *operands: nnx.merge(lone_graph, params).read(*operands), caches

    return StepFunctions(
        mesh=mesh,
        attention=f"{kernel} ({reason})",
        n_parameters=count_parameters(model),
        warnings=(
            *fallback_warnings(model, kernel, reason, capability),
            *partition.undivided_dims_warnings(
                axes, shapes, partition.parameter_rules(parallel.zero_stage), mesh
            ),
        ),
        batch_shape=training_batch(config, batch_sharding),
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
            compiler_options=step_options(device.platform, mesh.size),
        ),
        eval_step=jax.jit(
            sharded.losses, in_shardings=(at_rest.params, batch_sharding), out_shardings=whole
        ),
        reader=reader,
        jitted=lambda kind, function, *operands: jax.jit(function, out_shardings=whole),
    )
