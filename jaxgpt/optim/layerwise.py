"""Updates that process one layer at a time, for state in host memory.

Each outermost dict in a tree of parameters, gradients or optimizer state maps names to weights. Its
entry `layers`, if any, contains the weights of all layers, stacked as arrays (L, ...).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxgpt.optim.parameters import Parameters
from jaxgpt.parallel.offload import layer, layerwise_replace, match_memory, to_device, to_host
from jaxgpt.parallel.sharding import Params

# Function from (parameters, gradients, params, opt_state) to the new params and opt_state. It also
# works on part of the weights.
PartUpdate = Callable[[Parameters, Params, Params, Any], tuple[Params, Any]]


def layerwise_update(
    update: PartUpdate, parameters: Parameters, gradients: Params, params: Params, opt_state: Any
) -> tuple[Params, Any]:
    """Compute `update(parameters, gradients, params, opt_state)` one layer at a time.

    Each new array is stored in the same memory, host or device, as the old one. A scan over
    the layers calls `update` with the `Parameters`, gradients, parameters and optimizer state of
    one layer. A separate call updates the weights outside the layers and any state without a layer
    dimension, such as an update count.
    """
    of_layer, outside = _split(parameters)
    stacks = _in_layers((params, opt_state))

    def change(dicts: list[Params], gradients: Params) -> list[Params]:
        one_layer = iter(dicts)
        old = _map_dicts(lambda _: next(one_layer), stacks)
        return _dicts_in(update(of_layer, gradients, *old))

    layers = iter(layerwise_replace(change, _dicts_in(stacks), _in_layers(gradients)))
    old = _outside_layers((params, opt_state))
    new = update(outside, *jax.tree.map(to_device, (_outside_layers(gradients), *old)))
    rest = jax.tree.map(match_memory, new, old)
    return _map_dicts(lambda part: part | next(layers), rest)


def layerwise_init(
    make_optimizer: Callable[[Parameters], optax.GradientTransformation],
    parameters: Parameters,
    params: Params,
) -> optax.OptState:
    """Return the initial optimizer state, computed one layer at a time.

    The state is in host memory, except for arrays that do not belong to a parameter, such as an
    update count.
    """
    of_layer, outside = _split(parameters)
    layers = _in_layers(params)

    def init(i: jax.Array) -> list[Params]:
        found = _dicts_in(make_optimizer(of_layer).init(layer(layers, i)))
        return to_host(jax.tree.map(lambda x: x[0], found))

    numbers = jnp.arange(jax.tree.leaves(parameters.weights["layers"])[0].n_layers)
    stacks = iter(jax.lax.map(init, numbers))
    rest = make_optimizer(outside).init(jax.tree.map(to_device, _outside_layers(params)))
    return _map_dicts(lambda part: to_host(part) | next(stacks), rest)


def layerwise_norm(gradients: Params) -> jax.Array:
    """Return the L2 norm over all arrays, moving one layer at a time to device memory."""

    def add(total: jax.Array, i: jax.Array) -> tuple[jax.Array, None]:
        return total + optax.tree.norm(layer(gradients["layers"], i), squared=True), None

    rest = jax.tree.map(to_device, _outside_layers(gradients))
    n_layers = len(jax.tree.leaves(gradients["layers"])[0])
    total = optax.tree.norm(rest, squared=True)
    return jnp.sqrt(jax.lax.scan(add, total, jnp.arange(n_layers))[0])


def _split(parameters: Parameters) -> tuple[Parameters, Parameters]:
    """Return one layer's parameters, as stacks of size 1, and the parameters outside the layers."""
    stacked = parameters.where(lambda w: w.n_layers > 0)
    one = jax.tree.map(lambda w: dataclasses.replace(w, shape=(1, *w.shape[1:])), stacked.weights)
    return Parameters(one, stacked.shardings), parameters.where(lambda w: not w.n_layers)


def _in_layers(tree: Any) -> Any:
    """Return the tree with only the entry `layers` in each dict."""
    return _map_dicts(lambda part: {k: x for k, x in part.items() if k == "layers"}, tree)


def _outside_layers(tree: Any) -> Any:
    """Return the tree without the entry `layers` in each dict."""
    return _map_dicts(lambda part: {k: x for k, x in part.items() if k != "layers"}, tree)


def _map_dicts(function: Callable[[Params], Params], tree: Any) -> Any:
    """Apply a function to each outermost dict in a tree, and keep the other leaves."""
    return jax.tree.map(lambda x: function(x) if _is_dict(x) else x, tree, is_leaf=_is_dict)


def _dicts_in(tree: Any) -> list[Params]:
    """Return the outermost dicts in a tree."""
    return list(filter(_is_dict, jax.tree.leaves(tree, is_leaf=_is_dict)))


def _is_dict(x: Any) -> bool:
    return isinstance(x, dict)
