"""The training state: its arrays, their sharding, and their format in a checkpoint."""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import optax
from flax import nnx
from flax.traverse_util import unflatten_dict
from jax.sharding import Mesh
from jax.tree_util import keystr, tree_leaves_with_path, tree_map_with_path

from jaxgpt.checkpoint.checkpointer import Checkpoints
from jaxgpt.config import Config
from jaxgpt.models.transformer import GPT
from jaxgpt.models.weights import weights
from jaxgpt.optim import make_optimizer
from jaxgpt.optim.layerwise import layerwise_init
from jaxgpt.optim.parameters import Parameters
from jaxgpt.optim.state import opt_state_shardings
from jaxgpt.parallel import sharding
from jaxgpt.parallel.mesh import describe
from jaxgpt.parallel.offload import stacked_in_host, to_device
from jaxgpt.parallel.sharding import Params
from jaxgpt.spikes.detector import (
    SpikeState,
    init_spike_state,
    spike_state_from_json,
    spike_state_to_json,
)


class TrainState(NamedTuple):
    """The state that a training step updates."""

    params: Params
    opt_state: optax.OptState
    spike_state: SpikeState  # of the spike detector; empty if spike.action=off

    def __repr__(self) -> str:
        parts = zip(self._fields, self, strict=True)
        sizes = (f"{name} ({sum(x.size for x in jax.tree.leaves(part)):,})" for name, part in parts)
        return f"<TrainState, element counts: {', '.join(sizes)}>"


def optimizer_of(config: Config) -> optax.GradientTransformation:
    """Return a run's optimizer for unsharded parameters.

    It does not apply the learning rate. model.vocab_size must be set.
    """
    return make_optimizer(config.optimizer, Parameters(weights(config.model)))


def init_state(config: Config) -> TrainState:
    """Return the state before the first step, with parameters initialized from train.seed.

    model.vocab_size must be set.
    """
    stacked = stacked_in_host if config.parallel.offload == "state" else nnx.vmap
    network = GPT(config.model, stacked=stacked, rngs=nnx.Rngs(params=config.train.seed))
    return state_of(config, nnx.to_pure_dict(nnx.state(network, nnx.Param)))


def state_of(config: Config, params: Params) -> TrainState:
    """Return the state before the first step, with the given parameters.

    A learned position-embedding table is truncated to its first model.block_size rows.
    model.vocab_size must be set.
    """
    if "position_embedding" in params:
        w_TD = to_device(params["position_embedding"]["embedding"])[: config.model.block_size]
        params = params | {"position_embedding": {"embedding": w_TD}}
    if config.parallel.offload == "none":
        opt_state = optimizer_of(config).init(params)
    else:
        make = functools.partial(make_optimizer, config.optimizer)
        opt_state = layerwise_init(make, Parameters(weights(config.model)), params)
    return TrainState(params, opt_state, init_spike_state(config.spike))


def state_shapes(config: Config, mesh: Mesh) -> TrainState:
    """Return the shape, dtype and sharding of every array in the state, without allocating it.

    parallel.zero_stage determines how the parameters and the optimizer state are sharded, and
    parallel.offload determines which of them are in host memory. model.vocab_size must be set.
    """
    zero_stage, described = config.parallel.zero_stage, weights(config.model)
    offload = config.parallel.offload
    params, moments = (
        sharding.weight_shardings(described, rules, mesh, "pinned_host" if in_host else None)
        for rules, in_host in (
            (sharding.parameter_rules(zero_stage), offload == "state"),
            (sharding.opt_state_rules(zero_stage), offload != "none"),
        )
    )
    state = jax.eval_shape(functools.partial(init_state, config))
    placed = TrainState(
        params,
        opt_state_shardings(optimizer_of(config), state.params, moments, mesh),
        jax.tree.map(lambda _: sharding.replicated(mesh), state.spike_state),
    )
    return jax.tree.map(
        lambda s, where: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=where), state, placed
    )


def checkpoint_tree(state: TrainState) -> dict[str, Any]:
    """Return the arrays of `state` that a checkpoint stores, as nested dicts.

    The keys are `params` and, unless the optimizer is stateless, `opt_state`. `state` may hold
    `jax.ShapeDtypeStruct`s instead of arrays.
    """
    named = {_path(path): leaf for path, leaf in tree_leaves_with_path(state.opt_state)}
    return {"params": state.params} | ({"opt_state": unflatten_dict(named)} if named else {})


def checkpoint_json(state: TrainState, mesh: Mesh, n_processes: int) -> dict[str, Any]:
    """Return the part of a checkpoint's JSON that describes the state and the job.

    The keys are `mesh`, `processes`, `jax` and `spike_state`. The state of the spike detector is
    stored as JSON instead of arrays, because spike.window may change when a run resumes.
    """
    return {
        "mesh": describe(mesh),
        "processes": n_processes,
        "jax": jax.__version__,
        "spike_state": spike_state_to_json(state.spike_state),
    }


def state_from_checkpoint(
    tree: Mapping[str, Any], meta: Mapping[str, Any], shapes: TrainState
) -> TrainState:
    """Rebuild the state from a checkpoint's contents.

    `tree` and `meta` are the restored arrays and JSON. They include the results of
    `checkpoint_tree` and `checkpoint_json`. `shapes` is the result of `state_shapes`. It determines
    the structure of the optimizer state and of the spike detector's state. The parameters are not
    compared with it, and shapes of arrays are not checked. Raises `KeyError` if `params` or an
    array of the optimizer state is missing.
    """
    leaves = {_path(path): leaf for path, leaf in tree_leaves_with_path(tree.get("opt_state", {}))}
    opt_state = tree_map_with_path(lambda path, _: leaves[_path(path)], shapes.opt_state)
    spike_state = spike_state_from_json(meta.get("spike_state"), shapes.spike_state)
    return TrainState(tree["params"], opt_state, spike_state)


def restore_state(checkpoints: Checkpoints, step: int, shapes: TrainState) -> TrainState:
    """Return the state that was saved after `step`, with the shapes and shardings of `shapes`.

    All processes must call this. Raises `DamagedCheckpoint` on every process, as
    `Checkpoints.restore` does.
    """
    return state_from_checkpoint(*checkpoints.restore(step, checkpoint_tree(shapes)), shapes)


def _path(path: tuple[Any, ...]) -> tuple[str, ...]:
    return tuple(keystr((key,), simple=True) for key in path)
