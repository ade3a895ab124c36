"""What a run carries from step to step, and the compiled functions that carry it."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxgpt.config import Config
from jaxgpt.parallel.sharding import Params

# What a layer computes twice to save memory, XLA's CPU compiler computes once and keeps, unless
# it leaves in place the barriers that jax.checkpoint puts between the two.
CPU_STEP_OPTIONS = {"xla_disable_hlo_passes": "cse_barrier_expander"}
# It runs once: on a CPU, LLVM's costlier passes take longer than they save.
CPU_INIT_OPTIONS = {"xla_backend_optimization_level": 1}

# Collectives run while what does not need them is computed; a single GPU has none.
GPU_STEP_OPTIONS = {"xla_gpu_enable_latency_hiding_scheduler": True}

# (caches, tokens_1T, position of the first of them) -> (logits_1V, caches), see `GPT.read`.
Read = Callable[[Any, jax.Array, Any], tuple[jax.Array, Any]]


def training_batch(config: Config, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    """A global batch of the training split: int32, shape (B, T+1)."""
    shape = (config.train.batch_size, config.model.block_size + 1)
    return jax.ShapeDtypeStruct(shape, np.int32, sharding=sharding)


def step_options(platform: str, n_devices: int) -> dict[str, Any] | None:
    """Options of XLA's compiler for a train step, but for those that XLA_FLAGS names.

    Args:
        platform: of the devices, as JAX names it: cpu, gpu, tpu ...
    """
    options: dict[str, Any] = {}
    if platform == "gpu" and n_devices > 1:
        options = GPU_STEP_OPTIONS
    elif platform == "cpu":
        options = CPU_STEP_OPTIONS
    flags = os.environ.get("XLA_FLAGS", "")  # which XLA would let these go before
    return {name: value for name, value in options.items() if f"--{name}" not in flags} or None


class TrainState(NamedTuple):
    """Everything that a step changes."""

    params: Params
    opt_state: dict[str, Any]
    """Adam's moments `mu` and `nu`, each like the parameters, and its `count` of updates."""
    watch: dict[str, Any] = {}
    """What `detection.init_spike_state` describes: the last losses and gradient norms."""


class Metrics(NamedTuple):
    """What a step reports, on the device and the same on every one: float32 scalars, and more."""

    loss: jax.Array
    """Mean cross-entropy over all tokens of the global batch, in nats."""
    grad_norm: jax.Array
    """Global norm of the gradient, before clipping."""
    lr: jax.Array
    row_losses: jax.Array
    """Mean loss of each row of the global batch, in its order: float32 (B,)."""
    cause: jax.Array
    """This and the next three are those of `detection.Detection`."""
    medians: jax.Array
    limits: jax.Array
    nonfinite: jax.Array


@dataclass(frozen=True)
class StepFunctions:
    """The compiled functions, and where their state lives."""

    mesh: Mesh
    attention: str
    """Which attention kernel runs, and why."""
    n_parameters: tuple[int, int]
    """All of them, and without the position embedding."""
    warnings: tuple[str, ...]
    """What of the layout is not as asked for."""
    batch_shape: jax.ShapeDtypeStruct
    """What `train_step` takes, as `training_batch` has it; all batches are sharded so."""
    replicated: NamedSharding
    state_shapes: TrainState
    """`jax.ShapeDtypeStruct`s with their shardings: what a checkpoint is restored into."""
    init: Callable[[], TrainState]
    train_step: Callable[[TrainState, int, jax.Array], tuple[TrainState, Metrics]]
    """(state, step, tokens of shape (B, T+1)) -> (next state, metrics); donates the state."""
    eval_step: Callable[[Params, jax.Array], jax.Array]
    """(params, tokens of shape (B, T+1)) -> mean loss of each row, shape (B,)."""
    reader: Callable[[Params], tuple[Read, Any]]
    """With these parameters: what reads one text at a time, and empty caches."""
    jitted: Callable[..., Callable[..., jax.Array]]
    """(kind, function of parameters and more, shapes of the more) -> `jax.jit` of the function,
    its result whole on every device; where programs are stored, under a name with `kind` in it."""

    def lower_train_step(self) -> jax.stages.Lowered:
        """The train step, traced and not yet compiled. Allocates nothing."""
        return self.train_step.lower(self.state_shapes, np.int32(0), self.batch_shape)
