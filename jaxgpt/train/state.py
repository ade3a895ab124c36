"""The state of a run, which its steps change, and where each of its arrays lies."""

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.tree_util import keystr, tree_leaves_with_path, tree_map_with_path

from jaxgpt.config import Config
from jaxgpt.models.transformer import GPT
from jaxgpt.models.weights import abstract_params, decay_mask, weights
from jaxgpt.optim import make_optimizer, opt_state_shardings
from jaxgpt.parallel import sharding
from jaxgpt.parallel.sharding import Params
from jaxgpt.spikes.detector import (
    SpikeState,
    init_spike_state,
    spike_state_from_json,
    spike_state_to_json,
)
from jaxgpt.train.step_metrics import Metrics

# What a layer computes twice to save memory, XLA's CPU compiler computes once and keeps, unless
# it leaves in place the barriers that jax.checkpoint puts between the two.
CPU_STEP_OPTIONS = {"xla_disable_hlo_passes": "cse_barrier_expander"}
# It runs once: on a CPU, LLVM's costlier passes take longer than they save.
CPU_INIT_OPTIONS = {"xla_backend_optimization_level": 1}

# Collectives run while what does not need them is computed; a single GPU has none.
GPU_STEP_OPTIONS = {"xla_gpu_enable_latency_hiding_scheduler": True}

# (caches, tokens_1T, position of the first of them) -> (logits_1V, caches), see `GPT.decode_step`.
DecodeFn = Callable[[Any, jax.Array, Any], tuple[jax.Array, Any]]


class TrainState(NamedTuple):
    """Everything that a step changes."""

    params: Params
    opt_state: optax.OptState
    spike_state: SpikeState
    """The spike detector's window of losses and gradient norms."""


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


def optimizer_of(config: Config) -> optax.GradientTransformation:
    """Return the optimizer of a run, without the learning rate."""
    return make_optimizer(config.optimizer, decay_mask(config.model))


def init_state(config: Config) -> TrainState:
    """Return the state before the first step, of model.vocab_size, train.seed and the optimizer."""
    network = GPT(config.model, rngs=nnx.Rngs(params=config.train.seed))
    params = nnx.to_pure_dict(nnx.state(network, nnx.Param))
    return TrainState(params, optimizer_of(config).init(params), init_spike_state(config.spike))


def state_shapes(config: Config, mesh: Mesh) -> TrainState:
    """Return shape, dtype and sharding of every array of the state, without computing any.

    The optimizer's state is sharded as `parallel.zero_stage` says; with
    parallel.offload_optimizer it lies in the host's memory between steps.
    """
    stage = config.parallel.zero_stage

    def shardings(rules: sharding.Rules, memory_kind: str | None = None) -> Any:
        specs = sharding.partition_specs(weights(config.model), rules, mesh)
        return sharding.shardings(specs, mesh, memory_kind)

    memory_kind = "pinned_host" if config.parallel.offload_optimizer else None
    moments = shardings(sharding.opt_state_rules(stage), memory_kind)
    state = jax.eval_shape(functools.partial(init_state, config))
    whole = sharding.replicated(mesh)
    placed = TrainState(
        shardings(sharding.parameter_rules(stage)),
        opt_state_shardings(optimizer_of(config), abstract_params(config.model), moments, mesh),
        jax.tree.map(lambda _: whole, state.spike_state),
    )
    return jax.tree.map(
        lambda s, where: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=where), state, placed
    )


def checkpoint_tree(state: TrainState) -> dict[str, Any]:
    """Return the arrays of a checkpoint: `params` and `opt_state`, nested dicts."""
    return {"params": state.params, "opt_state": _by_name(state.opt_state)}


def checkpoint_json(state: TrainState) -> dict[str, Any]:
    """Return the rest of the state for the JSON of a checkpoint: arrays whose length may change."""
    return {"spike_state": spike_state_to_json(state.spike_state)}


def state_from_checkpoint(
    tree: Mapping[str, Any], meta: Mapping[str, Any], shapes: TrainState
) -> TrainState:
    """Return the state of `checkpoint_tree` and `checkpoint_json`, in the structure of `shapes`."""
    leaves = {_path(path): leaf for path, leaf in tree_leaves_with_path(tree["opt_state"])}
    opt_state = tree_map_with_path(lambda path, _: leaves[_path(path)], shapes.opt_state)
    spike_state = spike_state_from_json(meta.get("spike_state"), shapes.spike_state)
    return TrainState(tree["params"], opt_state, spike_state)


def _by_name(tree: Any) -> dict[str, Any]:
    """Return named tuples and other nodes of a pytree as nested dicts, by field name or number."""
    out: dict[str, Any] = {}
    for path, leaf in tree_leaves_with_path(tree):
        *parents, name = _path(path)
        functools.reduce(lambda folder, key: folder.setdefault(key, {}), parents, out)[name] = leaf
    return out


def _path(path: tuple[Any, ...]) -> tuple[str, ...]:
    return tuple(keystr((key,), simple=True) for key in path)


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
