"""Muon (kellerjordan.github.io/posts/muon) for hidden matrices, AdamW for everything else."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxgpt.config import OptimizerConfig
from jaxgpt.models.weights import Weight
from jaxgpt.optim.adamw import adamw
from jaxgpt.optim.newton_schulz import newton_schulz_flops, orthogonalize
from jaxgpt.optim.parameters import Parameters, merge, select
from jaxgpt.parallel.sharding import Params

# RMS of the elements of an update. AdamW's updates have about the same RMS (arXiv 2502.16982,
# section 2.2).
UPDATE_RMS = 0.2


class MuonState(NamedTuple):
    """State of Muon, and of AdamW for the parameters that Muon does not update."""

    momentum: Params  # moving average of gradients, for hidden matrices
    adamw: optax.OptState  # for all other parameters


def muon(config: OptimizerConfig, parameters: Parameters) -> optax.GradientTransformation:
    """Return Muon; the caller applies the learning rate.

    The Nesterov momentum of each hidden matrix is orthogonalized and multiplied by
    0.2 sqrt(max(rows, columns)). With this factor from Moonlight (arXiv 2502.16982), AdamW's
    learning rate and weight decay can be used unchanged. The matrices in `qkv`, `kv` and `gate_up`
    are orthogonalized separately. AdamW updates embeddings, the output layer, norms and biases.
    AdamW's learning rate follows the same schedule, and its peak is
    `optimizer.adamw_learning_rate` (by default, Muon's peak). If this key is set,
    `optimizer.learning_rate` must not be 0.
    """
    hidden = parameters.where(is_hidden_matrix)
    others = parameters.where(lambda w: not is_hidden_matrix(w))
    adam, beta = adamw(config, others), config.momentum
    ratio = adamw_ratio(config)

    def init(params: Params) -> MuonState:
        momentum = jax.tree.map(jnp.zeros_like, select(params, hidden.weights))
        return MuonState(momentum, adam.init(select(params, others.weights)))

    def average(old: Params, new: Params) -> Params:
        return jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, old, new)

    def direction(weight: Weight, orthogonal: jax.Array, param: jax.Array) -> jax.Array:
        _, inputs, outputs = weight.matrix_dims
        size = max(math.prod(param.shape[i] for i in dims) for dims in (inputs, outputs))
        return UPDATE_RMS * math.sqrt(size) * orthogonal + config.weight_decay * param

    def update(gradients: Params, state: MuonState, params: Params) -> tuple[Params, MuonState]:
        own = select(gradients, hidden.weights)
        momentum = average(state.momentum, own)
        orthogonal = orthogonalize(average(momentum, own), hidden)  # Nesterov's momentum
        directions = jax.tree.map(
            direction, hidden.weights, orthogonal, select(params, hidden.weights)
        )
        rest, adam_state = adam.update(
            select(gradients, others.weights), state.adamw, select(params, others.weights)
        )
        rest = jax.tree.map(lambda x: ratio * x, rest)
        return merge(directions, rest), MuonState(momentum, adam_state)

    return optax.GradientTransformation(init, update)


def is_hidden_matrix(weight: Weight) -> bool:
    """Return whether Muon updates a weight. It updates only the matrices in the layers."""
    return weight.role == "matrix" and weight.n_layers > 0


def adamw_ratio(config: OptimizerConfig) -> float:
    """Return adamw_learning_rate / learning_rate, or 1 if adamw_learning_rate is not set.

    If adamw_learning_rate is set, learning_rate must not be 0.
    """
    if config.adamw_learning_rate is None:
        return 1.0
    return config.adamw_learning_rate / config.learning_rate


def update_flops(config: OptimizerConfig, parameters: Parameters) -> int:
    """Return the FLOPs that each device spends on matmuls in one update of `parameters`.

    The result is 0 for every optimizer except Muon. With parallel.offload, layers are updated one
    at a time, which may take more FLOPs because of padding.
    """
    if config.name != "muon":
        return 0
    return newton_schulz_flops(parameters.where(is_hidden_matrix))
