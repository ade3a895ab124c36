"""Gradient clipping and conditional updates."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxgpt.optim.parameters import Parameters
from jaxgpt.parallel.offload import (
    is_in_host,
    layer,
    layerwise_replace,
    match_memory,
    to_device,
    to_host,
)
from jaxgpt.parallel.sharding import Params

# Function from (params, opt_state) to their values after an update.
Update = Callable[[Params, Any], tuple[Params, Any]]

# Each gate is used on the platform where it does not make XLA copy the state. Additional temporary
# memory was measured in a step of gpt2 with 4 layers on one device (JAX 0.10.2, 2026-11). On a CPU,
# `gate_by_where` needs 216 MB and `gate_sequentially` needs none. On an H100, `gate_by_where` needs
# 0.1 MB, `gate_sequentially` needs 53 MB, and `jax.lax.cond` would need 782 MB.


def gated_update(
    is_due: jax.Array | None,
    update: Callable[..., tuple[Params, Any]],
    parameters: Parameters,
    gradients: Params,
    *old: Any,
    on_cpu: bool,
    by_layer: bool,
) -> tuple[Params, Any]:
    """Return `update(parameters, gradients, *old)` if the update is due, else `old` unchanged.

    Args:
        is_due: boolean scalar from `detect_and_gate` in spikes/detector.py, or None if every update
            is due.
        update: function that returns the new parameters and the new optimizer state.
        old: the parameters and the optimizer state.
        on_cpu: use the gate that needs less memory on a CPU. Ignored if `by_layer` is True.
        by_layer: update one layer at a time, with `_layerwise_update`. `update` must then treat
            each layer independently of the other weights.
    """
    if by_layer:
        return _layerwise_update(is_due, update, parameters, gradients, *old)
    gate = gate_sequentially if on_cpu else gate_by_where
    return gate(is_due, functools.partial(update, parameters, gradients), *old)


def gate_by_where(is_due: jax.Array | None, update: Update, *old: Any) -> tuple[Params, Any]:
    """Return `update(*old)` if `is_due` is True or None, else `old` unchanged."""
    new = update(*old)
    # Select the values instead of multiplying the update by 0, because 0 * NaN is NaN.
    return new if is_due is None else jax.tree.map(functools.partial(jnp.where, is_due), new, old)


def gate_sequentially(is_due: jax.Array | None, update: Update, *old: Any) -> tuple[Params, Any]:
    """Return the same as `gate_by_where`, but gate the parameters before the optimizer state.

    Unless `is_due` is None, this calls `update` twice, and XLA removes the computations whose
    results are not used.
    """
    if is_due is None:
        return update(*old)
    choose, (params, opt_state) = functools.partial(jnp.where, is_due), old
    new_params = jax.tree.map(choose, update(params, opt_state)[0], params)
    new_params, opt_state = jax.lax.optimization_barrier((new_params, opt_state))
    return new_params, jax.tree.map(choose, update(params, opt_state)[1], opt_state)


def _layerwise_update(
    is_due: jax.Array | None,
    update: Callable[..., tuple[Params, Any]],
    parameters: Parameters,
    gradients: Params,
    *old: Any,
) -> tuple[Params, Any]:
    """Compute `gated_update` one layer at a time.

    Each new array is stored in the same memory, host or device, as the old one. A scan over
    the layers calls `update` with the `Parameters`, gradients, parameters and optimizer state of
    one layer. A separate call updates the weights outside the layers and any state without a layer
    dimension, such as an update count.
    """

    def gated(parameters: Parameters, gradients: Params, old: Any) -> Any:
        return gate_by_where(is_due, functools.partial(update, parameters, gradients), *old)

    of_layer, outside = _parts(parameters)
    parts, tree = jax.tree.flatten(_part(old, True), is_leaf=_is_dict)

    def change(stacks: list[Params], gradients: Params) -> list[Params]:
        own = iter(stacks)
        filled = tree.unflatten(next(own) if _is_dict(part) else part for part in parts)
        return _dicts(gated(of_layer, gradients, filled))

    layers = iter(layerwise_replace(change, _dicts(parts), _part(gradients, True)))
    on_device = jax.tree.map(to_device, (_part(gradients, False), _part(old, False)))
    rest = jax.tree.map(match_memory, gated(outside, *on_device), _part(old, False))
    return jax.tree.map(
        lambda part: part | next(layers) if _is_dict(part) else part, rest, is_leaf=_is_dict
    )


def layerwise_init(
    make_optimizer: Callable[[Parameters], optax.GradientTransformation],
    parameters: Parameters,
    params: Params,
) -> optax.OptState:
    """Return the initial optimizer state, computed one layer at a time.

    The state is in host memory, except for arrays that do not belong to a parameter, such as an
    update count.
    """
    of_layer, outside = _parts(parameters)
    layers = _part(params, True)

    def init(i: jax.Array) -> list[Params]:
        found = _dicts(make_optimizer(of_layer).init(layer(layers, i)))
        return to_host(jax.tree.map(lambda x: x[0], found))

    numbers = jnp.arange(jax.tree.leaves(parameters.weights["layers"])[0].n_layers)
    stacks = iter(jax.lax.map(init, numbers))
    rest = make_optimizer(outside).init(jax.tree.map(to_device, _part(params, False)))
    return jax.tree.map(
        lambda part: to_host(part) | next(stacks) if _is_dict(part) else part,
        rest,
        is_leaf=_is_dict,
    )


def _parts(parameters: Parameters) -> tuple[Parameters, Parameters]:
    """Return one layer's parameters, as stacks of size 1, and the parameters outside the layers."""
    stacked = parameters.where(lambda w: w.n_layers > 0)
    one = jax.tree.map(lambda w: dataclasses.replace(w, shape=(1, *w.shape[1:])), stacked.weights)
    return Parameters(one, stacked.shardings), parameters.where(lambda w: not w.n_layers)


def _part(tree: Any, in_layers: bool) -> Any:
    """Filter each dict of weights in a tree: keep either the layers or everything else."""

    def choose(part: Any) -> Any:
        if not _is_dict(part):
            return part
        return {name: x for name, x in part.items() if (name == "layers") == in_layers}

    return jax.tree.map(choose, tree, is_leaf=_is_dict)


def _dicts(tree: Any) -> list[Params]:
    return list(filter(_is_dict, jax.tree.leaves(tree, is_leaf=_is_dict)))


def _is_dict(x: Any) -> bool:
    return isinstance(x, dict)


def global_norm(gradients: Params) -> jax.Array:
    """Return the L2 norm over all arrays, as a scalar of the same dtype.

    If any array is in host memory, layers are moved to the device one at a time. Otherwise, the
    arrays are sorted, so that the norm does not depend on how layers are grouped into modules. The
    sort key consists of the first component and the last two components of an array's path.
    """
    if any(map(is_in_host, jax.tree.leaves(gradients))):
        return _layerwise_norm(gradients)

    def names(item: tuple[Any, jax.Array]) -> tuple[str, ...]:
        path = [key.key for key in item[0]]
        return path[0], *path[-2:]

    leaves = sorted(jax.tree.leaves_with_path(gradients), key=names)
    return optax.tree.norm([leaf for _, leaf in leaves])


def _layerwise_norm(gradients: Params) -> jax.Array:
    """Return the L2 norm over all arrays, moving one layer at a time to device memory."""

    def add(total: jax.Array, i: jax.Array) -> tuple[jax.Array, None]:
        return total + optax.tree.norm(layer(gradients["layers"], i), squared=True), None

    rest = jax.tree.map(to_device, _part(gradients, False))
    n_layers = len(jax.tree.leaves(gradients["layers"])[0])
    total = optax.tree.norm(rest, squared=True)
    return jnp.sqrt(jax.lax.scan(add, total, jnp.arange(n_layers))[0])


def clip_by_norm(gradients: Params, norm: jax.Array, limit: float) -> Params:
    """Return the gradients, scaled down to the global norm `limit` if `norm` is larger.

    `norm` is the `global_norm` of all gradients, even if `gradients` holds only some of them. A
    `limit` of 0 disables clipping. Otherwise, the result agrees with optax.clip_by_global_norm,
    applied to all gradients, up to rounding. A NaN norm then makes all results NaN, and an infinite
    norm makes finite gradients 0. optax is not used, because it would compute the norm over all
    devices a second time.
    """
    if limit == 0:
        return gradients
    scale = jnp.where(norm < limit, 1.0, limit / norm)
    return jax.tree.map(lambda g: g * scale, gradients)
