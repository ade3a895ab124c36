"""The compiled functions of a run: built from a config and a mesh, nothing is computed yet."""

import dataclasses
import functools
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxgpt.config import Config, MeshShape
from jaxgpt.models.attention import (
    Attention,
    choose_attention,
    cuda_capability,
    fallback_warnings,
    make_attention,
    without_scores,
)
from jaxgpt.models.kv_cache import Caches, empty_caches, unstack_layers
from jaxgpt.models.loss import LogitMetrics
from jaxgpt.models.transformer import GPT
from jaxgpt.models.weights import (
    activation_bytes,
    count_parameters,
    weights,
)
from jaxgpt.optim import learning_rate_schedule
from jaxgpt.parallel import sharding
from jaxgpt.parallel.mesh import mesh_axes_with
from jaxgpt.parallel.sharding import FSDP, TENSOR, Params
from jaxgpt.parallel.tensor import ShardMapContext
from jaxgpt.parallel.zero import (
    param_layout,
)
from jaxgpt.train.gradients import ShardedModel
from jaxgpt.train.reporting.step_metrics import Metrics, logit_metrics
from jaxgpt.train.state import TrainState, init_state, optimizer_of, state_shapes
from jaxgpt.train.step import StepParts, gate_by_where, gate_in_turn, train_step

# (caches, tokens_1T, position of the first of them) -> (logits_1V, caches), see `GPT.decode_step`.
DecodeFn = Callable[[Any, jax.Array, Any], tuple[jax.Array, Any]]


# What a layer computes twice to save memory, XLA's CPU compiler computes once and keeps, unless
# it leaves in place the barriers that jax.checkpoint puts between the two.
CPU_STEP_OPTIONS = {"xla_disable_hlo_passes": "cse_barrier_expander"}

# It runs once: on a CPU, LLVM's costlier passes take longer than they save.
CPU_INIT_OPTIONS = {"xla_backend_optimization_level": 1}

# Collectives run while what does not need them is computed; a single GPU has none.
GPU_STEP_OPTIONS = {"xla_gpu_enable_latency_hiding_scheduler": True}


SMALL_BYTES = 2**28  # of parameters: up to this size, all devices gather them to write samples

SLICE_BYTES = 2**29  # of activations; larger slices are slower, much smaller ones are too

GRADIENTS_PER_SLICE = 4  # at least so many times as large as the gradient that it adds to the sum


@dataclass(frozen=True)
class StepFunctions:
    """The compiled functions of a run, and where their state lies."""

    mesh: Mesh
    attention: str
    """The attention kernel, and why it was chosen."""
    n_parameters: tuple[int, int]
    """All parameters, and those without the position embedding."""
    warnings: tuple[str, ...]
    """Sentences about a layout that is not quite as asked for."""
    batch_shape: jax.ShapeDtypeStruct
    """The batch that `train_step` takes, as `training_batch` has it; all batches lie so."""
    state_shapes: TrainState
    """`jax.ShapeDtypeStruct`s with their shardings: what a checkpoint is restored into."""
    init: Callable[[], TrainState]
    train_step: Callable[[TrainState, int, jax.Array], tuple[TrainState, Metrics]]
    """(state, step, tokens of shape (B, T+1)) -> (next state, metrics); donates the state."""
    eval_step: Callable[[Params, jax.Array], jax.Array]
    """(params, tokens of shape (B, T+1)) -> mean loss of each row, shape (B,)."""
    make_decoder: Callable[[Params], tuple[DecodeFn, Any]]
    """Parameters -> (decode function of one text at a time, empty KV caches)."""

    @property
    def replicated(self) -> NamedSharding:
        """The sharding of what every device holds whole."""
        return sharding.replicated(self.mesh)

    def lower_train_step(self) -> jax.stages.Lowered:
        """Trace the train step without compiling it. Allocates nothing."""
        return self.train_step.lower(self.state_shapes, np.int32(0), self.batch_shape)


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


def shard_model(
    config: Config,
    mesh: Mesh,
    attend: Attention,
    n_slices: int = 1,
    on_cpu: bool = False,
    logit_metrics: LogitMetrics | None = None,
) -> ShardedModel:
    """Lay the network out on a mesh; nothing is computed yet.

    Args:
        config: with model.vocab_size set.
        attend: the attention function.
        n_slices: into how many slices each device cuts its rows of a microbatch.
        on_cpu: use the kernels for CPUs.
        logit_metrics: numbers to compute from the logits of training batches, by name.
    """
    model, train, parallel = config.model, config.train, config.parallel
    if parallel.remat == "attention":
        attend = without_scores(attend)
    context = ShardMapContext(
        tensor=mesh.shape[TENSOR],
        sequence_parallel=parallel.sequence_parallel and mesh.shape[TENSOR] > 1,
        dtype=jnp.dtype(train.dtype),
        on_cpu=on_cpu,
    )
    gathers = context.sequence_parallel or (parallel.zero_stage == 3 and mesh.shape[FSDP] > 1)
    keeps_all = parallel.remat in ("none", "attention")  # the others do not keep what they gather
    context = dataclasses.replace(context, regather_in_backward=gathers and keeps_all)
    param_specs, grad_specs, layouts = lay_out_weights(config, mesh, context)

    def graph(context: ShardMapContext, scan_layers: bool) -> nnx.GraphDef:
        network = functools.partial(
            GPT,
            model,
            dtype=context.dtype,
            attend=attend,
            parallel=context,
            scan_layers=scan_layers,
            remat=parallel.remat,
        )
        return nnx.graphdef(nnx.eval_shape(lambda: network(rngs=nnx.Rngs(0))))

    return ShardedModel(
        config=config,
        mesh=mesh,
        param_specs=param_specs,
        grad_specs=grad_specs,
        layouts=layouts,
        context=context,
        graph=graph(context, config.scans_layers(on_cpu)),
        decode_graph=graph(dataclasses.replace(context, sequence_parallel=False), True),
        n_slices=n_slices,
        logit_metrics=logit_metrics or {},
    )


def lay_out_weights(config: Config, mesh: Mesh, context: ShardMapContext) -> tuple[Any, Any, Any]:
    """Return `param_specs`, `grad_specs` and `layouts` of a `ShardedModel`."""
    stage = config.parallel.zero_stage
    described = weights(config.model)
    specs = functools.partial(sharding.partition_specs, described, mesh=mesh)
    param_specs = specs(sharding.parameter_rules(stage))
    grad_specs = specs(sharding.opt_state_rules(stage))
    layouts = jax.tree.map(
        functools.partial(
            param_layout,
            tensor=context.tensor,
            reduce_axes=mesh_axes_with("reduces_gradients", mesh),
            sequence_parallel=context.sequence_parallel,
            reduce_dtype=config.parallel.grad_reduce_dtype,
        ),
        param_specs,
        specs(sharding.gradient_rules(stage, config.reduces_once)),
        grad_specs,
        jax.tree.map(lambda w: w.axes, described),
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )
    return param_specs, grad_specs, layouts


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


def choose_n_slices(config: Config, mesh: Mesh) -> int:
    """Return into how many equal slices a CPU cuts its rows, to compute one after the other.

    Those that come nearest to `SLICE_BYTES` each. What a step keeps for its backward pass comes
    from the operating system anew every time, page by page, filled with zeros, and passes through
    the caches once: of few rows it is little. Gradients of slices add up as microbatches'.

    One where a slice would have to gather weights again, or talk to other devices between layers.
    parallel.remat changes nothing here: where it keeps less, slices take less memory still.

    Args:
        config: with model.vocab_size set, and rows that the mesh divides: none in a command that
            does not train.
    """
    shape = MeshShape(**mesh.shape)
    if shape.split_of("shards_parameters") * shape.split_of("splits_layers") > 1:
        return 1
    rows = config.microbatch_size // shape.split_of("splits_batch")
    gradient_bytes = 4 * count_parameters(config.model)[0]
    target = max(SLICE_BYTES, GRADIENTS_PER_SLICE * gradient_bytes) / activation_bytes(
        config.model, with_logits=not config.train.loss_chunk
    )
    if rows <= max(1, target):
        return 1
    divisors = [n for n in range(1, rows + 1) if rows % n == 0]
    return min(divisors, key=lambda n: abs(math.log(rows / n / target)))


def training_batch(config: Config, where: NamedSharding) -> jax.ShapeDtypeStruct:
    """Return the shape of a global batch of the training split: int32 (B, T+1)."""
    shape = (config.train.batch_size, config.model.block_size + 1)
    return jax.ShapeDtypeStruct(shape, np.int32, sharding=where)


def step_options(platform: str, n_devices: int) -> dict[str, Any] | None:
    """Return XLA's compiler options for a train step, without those that XLA_FLAGS names.

    Args:
        platform: of the devices, as JAX names it: cpu, gpu, tpu ...
    """
    options: dict[str, Any] = {}
    if platform == "gpu" and n_devices > 1:
        options = GPU_STEP_OPTIONS
    elif platform == "cpu":
        options = CPU_STEP_OPTIONS
    flags = os.environ.get("XLA_FLAGS", "")  # XLA would let these options go before the flags
    return {name: value for name, value in options.items() if f"--{name}" not in flags} or None
