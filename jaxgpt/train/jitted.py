"""The jitted functions of a run, built from a config and a mesh but not yet compiled."""

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxgpt.config import Config
from jaxgpt.data.batch import TokenRows
from jaxgpt.kernels.attention import Attention, without_scores
from jaxgpt.kernels.float8 import float8_warnings
from jaxgpt.models.attention import (
    KERNELS,
    AttentionSetting,
    choose_attention,
    cuda_capability,
    fallback_warnings,
)
from jaxgpt.models.decode import Cache
from jaxgpt.models.loss import TokenScores
from jaxgpt.models.weights import count_parameters, weights
from jaxgpt.parallel import sharding
from jaxgpt.parallel.mesh import describe
from jaxgpt.parallel.sharding import Params
from jaxgpt.train.inference import (
    DecodeFn,
    eval_logits,
    eval_losses,
    eval_tokens,
    make_decoder,
)
from jaxgpt.train.sharded_model import ShardedModel, choose_n_slices, shard_model
from jaxgpt.train.state import TrainState, init_state, state_of, state_shapes
from jaxgpt.train.step import Metrics, train_step

# By default, XLA's CPU compiler removes the barriers that jax.checkpoint inserts. XLA then merges
# recomputed operations with the original ones, so the original results stay in memory.
CPU_STEP_OPTIONS = {"xla_disable_hlo_passes": "cse_barrier_expander"}
# Initialization runs once, so LLVM's expensive passes would take longer than they save.
CPU_INIT_OPTIONS = {"xla_backend_optimization_level": 1}
# Overlap collectives with computation. On a single GPU there are no collectives.
SEVERAL_GPU_OPTIONS = {"xla_gpu_enable_latency_hiding_scheduler": True}
# Without this option, cuDNN attention sums its gradients in an order that depends on timing. XLA
# still chooses kernels by timing them during compilation; the compile cache stores the choice.
DETERMINISTIC_GPU_OPTIONS = {"xla_gpu_exclude_nondeterministic_ops": True}
# Disable Triton, and the merging of matmuls that share an operand (such as the query and key
# projections). With either of them, XLA would compute the matmuls of kernels/float8.py in bfloat16.
FLOAT8_GPU_OPTIONS = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_dot_merger_threshold_mb": 0}


@dataclass(frozen=True)
class JittedFunctions:
    """A run's functions, and the shapes and shardings of its state and training batch.

    All functions except `make_decoder` are jitted.
    """

    model: ShardedModel
    mesh: Mesh
    attention: str  # the attention kernel, and why it was chosen
    n_parameters: tuple[int, int]  # with and without lookup embeddings; see `count_parameters`
    warnings: tuple[str, ...]  # about the layout, the attention kernel and FP8
    batch_shape: jax.ShapeDtypeStruct | TokenRows  # global batch, as passed to `train_step`
    state_shapes: TrainState  # `jax.ShapeDtypeStruct`s with shardings, used to restore checkpoints
    init: Callable[[], TrainState]
    init_from: Callable[[Params], TrainState]
    """parameters -> the state before the first step."""
    train_step: Callable[
        [TrainState, np.int32, np.float32, jax.Array | TokenRows], tuple[TrainState, Metrics]
    ]
    """(state, step, learning rate, global batch) -> (next state, metrics); donates the state."""
    eval_step: Callable[[Params, jax.Array | TokenRows], jax.Array]
    """(params, int32 (B, T+1) or `TokenRows`) -> weighted mean loss of each row in nats, (B,)."""
    eval_tokens: Callable[[Params, jax.Array], TokenScores]
    """(params, int32 (B, T+1)) -> scores of every token except the first of each row, (B, T)."""
    eval_logits: Callable[[Params, jax.Array], jax.Array]
    """(params, int32 (B, T+1)) -> float32 next-token logits (B, T, V)."""
    make_decoder: Callable[[Params], tuple[DecodeFn, Cache]]
    """params -> (function that decodes one text, empty KV cache)."""

    def describe(self) -> str:
        """Return the parameter count (excluding lookup embeddings) and the mesh as text.

        For example: `2.53M parameters, data=2 fsdp=1 tensor=1`.
        """
        return f"{self.n_parameters[1] / 1e6:.2f}M parameters, {describe(self.mesh)}"

    @property
    def replicated(self) -> NamedSharding:
        """The sharding of replicated arrays."""
        return sharding.replicated(self.mesh)

    @property
    def batch_sharding(self) -> NamedSharding:
        """The sharding of a batch's arrays: their rows are split over the batch axes."""
        return sharding.batch_sharding(self.mesh)

    def lower_train_step(self) -> jax.stages.Lowered:
        """Trace and lower the train step, without compiling it or allocating arrays."""
        return self.train_step.lower(
            self.state_shapes, np.int32(0), np.float32(0), self.batch_shape
        )


def make_steps(
    config: Config,
    mesh: Mesh,
    attend: Attention | None = None,
    slices: int | None = None,
    on_cpu: bool | None = None,
    has_masks: bool = False,
    hosts: Sequence[int] | None = None,
) -> JittedFunctions:
    """Build the functions of a run from a configuration with model.vocab_size set.

    Args:
        mesh: a mesh that fits the configuration; see `job_mesh`.
        attend: the attention function; by default, the kernel that model.attention selects.
        slices: number of equal slices that each device's part of a microbatch is split into. It
            must divide the number of rows in that part, or the train step cannot be lowered. The
            default is the result of `choose_n_slices` if `on_cpu` is True, else 1.
        on_cpu: whether to build the model for CPUs; by default, True if `mesh` has CPU devices.
        has_masks: whether batches have loss weights (`Dataset.has_masks`).
        hosts: the host number of each process, by rank. None means that all devices share a host.
    """
    device, described = mesh.devices.flat[0], weights(config.model)
    on_cpu = device.platform == "cpu" if on_cpu is None else on_cpu
    setting = AttentionSetting(
        config.model,
        config.train.dtype,
        device.platform,
        cuda_capability(device),
        config.data.document_mask,
        config.train.deterministic,
    )
    kernel, reason = choose_attention(setting)
    attend = attend or KERNELS[kernel].make(setting)
    if slices is None:
        slices = choose_n_slices(config, mesh) if on_cpu else 1
    # Other kernels never store the scores for the backward pass.
    recomputes = config.parallel.remat == "attention" and KERNELS[kernel].stores_scores
    trained_attend = without_scores(attend) if recomputes else attend
    shard = functools.partial(
        shard_model,
        mesh=mesh,
        attend=trained_attend,
        n_slices=slices,
        on_cpu=on_cpu,
        hosts=hosts,
    )
    model = trained = shard(config)
    of_matmuls: tuple[str, ...] = ()
    if config.train.matmul_dtype is not None:
        of_matmuls = float8_warnings(device.platform, cuda_capability(device))
        # Evaluate without FP8, because FP8 scales would make a row's result depend on the other
        # rows.
        model = shard(config.replace(train__matmul_dtype=None))
    rules = sharding.opt_state_rules(config.parallel.zero_stage)  # these shard the most dimensions
    state, batch_at = state_shapes(config, mesh), sharding.batch_sharding(mesh)
    state_at, whole = jax.tree.map(lambda leaf: leaf.sharding, state), sharding.replicated(mesh)
    jit_eval = functools.partial(
        jax.jit, in_shardings=(state_at.params, batch_at), out_shardings=whole
    )
    return JittedFunctions(
        model=model,
        mesh=mesh,
        attention="; ".join(filter(None, [f"{kernel} ({reason})", model.context_note])),
        n_parameters=count_parameters(config.model),
        warnings=(
            *fallback_warnings(setting, kernel, reason),
            *of_matmuls,
            *sharding.undivided_dims_warnings(described, rules, mesh),
            *model.warnings,
        ),
        batch_shape=training_batch(config, batch_at, has_masks),
        state_shapes=state,
        init=jax.jit(
            functools.partial(init_state, config),
            out_shardings=state_at,
            compiler_options=CPU_INIT_OPTIONS if on_cpu else None,
        ),
        init_from=jax.jit(functools.partial(state_of, config), out_shardings=state_at),
        train_step=jax.jit(
            functools.partial(train_step, trained),
            in_shardings=(state_at, whole, whole, batch_at),
            out_shardings=(state_at, whole),
            donate_argnums=0,
            compiler_options=step_options(config, device.platform, mesh.size),
        ),
        eval_step=jit_eval(functools.partial(eval_losses, model)),
        eval_tokens=jit_eval(functools.partial(eval_tokens, model)),
        eval_logits=jit_eval(functools.partial(eval_logits, model)),
        make_decoder=functools.partial(make_decoder, model, attend),
    )


def training_batch(
    config: Config, where: NamedSharding, has_masks: bool
) -> jax.ShapeDtypeStruct | TokenRows:
    """Return the shape, dtype and sharding of a global training batch.

    The batch is `TokenRows` if `has_masks` is True, and otherwise int32 (B, T+1).
    """
    shape = (config.train.batch_size, config.model.block_size + 1)
    tokens = jax.ShapeDtypeStruct(shape, np.int32, sharding=where)
    if not has_masks:
        return tokens
    return TokenRows(tokens, jax.ShapeDtypeStruct(shape, np.uint8, sharding=where))


def step_options(config: Config, platform: str, n_devices: int) -> dict[str, Any] | None:
    """Return XLA's compiler options for the train step, except those already set in XLA_FLAGS.

    Return None if no options are left.
    """
    options = CPU_STEP_OPTIONS if platform == "cpu" else {}
    if platform == "gpu" and n_devices > 1:
        options = SEVERAL_GPU_OPTIONS
    if platform == "gpu" and config.train.deterministic:
        options = options | DETERMINISTIC_GPU_OPTIONS
    if platform == "gpu" and config.train.matmul_dtype is not None:
        options = options | FLOAT8_GPU_OPTIONS
    # A compiler option would override a flag.
    given = {flag.partition("=")[0] for flag in os.environ.get("XLA_FLAGS", "").split()}
    return {name: value for name, value in options.items() if f"--{name}" not in given} or None
