"""Gradient clipping and conditional updates."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxgpt.optim.layerwise import PartUpdate, layerwise_norm, layerwise_update
from jaxgpt.optim.parameters import Parameters
from jaxgpt.parallel.offload import is_in_host
from jaxgpt.parallel.sharding import Params

# Function from (params, opt_state) to their values after an update.
Update = Callable[[Params, Any], tuple[Params, Any]]

# Each gate is used on the platform where it does not make XLA copy the state. Additional temporary
# memory was measured in a step of gpt2 with 4 layers on one device (JAX 0.10.2, 2026-11). On a CPU,
# `gate_by_where` needs 216 MB and `gate_sequentially` needs none. On an H100, `gate_by_where` needs
# 0.1 MB, `gate_sequentially` needs 53 MB, and `jax.lax.cond` would need 782 MB.


def gated_update(
    is_due: jax.Array | None,
    update: PartUpdate,
    parameters: Parameters,
    gradients: Params,
    params: Params,
    opt_state: Any,
    *,
    on_cpu: bool,
    by_layer: bool,
) -> tuple[Params, Any]:
    """Return the result of `update`, or the old parameters and state if the update is not due.

    Args:
        is_due: boolean scalar from `detect_and_gate` in spikes/detector.py, or None if every update
            is due.
        update: function that takes the next four arguments, and returns the new parameters and the
            new optimizer state.
        parameters: descriptions of the parameters.
        gradients: the gradient of each parameter.
        params: the parameters.
        opt_state: the optimizer state.
        on_cpu: use the gate that needs less memory on a CPU. Ignored if `by_layer` is True.
        by_layer: update one layer at a time, with `layerwise_update`. `update` must then treat each
            layer independently of the other weights.
    """
    gate = gate_sequentially if on_cpu and not by_layer else gate_by_where

    def gated(
        parameters: Parameters, gradients: Params, params: Params, opt_state: Any
    ) -> tuple[Params, Any]:
        return gate(is_due, functools.partial(update, parameters, gradients), params, opt_state)

    if by_layer:
        return layerwise_update(gated, parameters, gradients, params, opt_state)
    return gated(parameters, gradients, params, opt_state)


def gate_by_where(
    is_due: jax.Array | None, update: Update, params: Params, opt_state: Any
) -> tuple[Params, Any]:
    """Return `update(params, opt_state)`, or its arguments unchanged if `is_due` is False.

    The update is also due if `is_due` is None.
    """
    new = update(params, opt_state)
    if is_due is None:
        return new
    # Select the values instead of multiplying the update by 0, because 0 * NaN is NaN.
    return jax.tree.map(functools.partial(jnp.where, is_due), new, (params, opt_state))


def gate_sequentially(
    is_due: jax.Array | None, update: Update, params: Params, opt_state: Any
) -> tuple[Params, Any]:
    """Return the same as `gate_by_where`, but gate the parameters before the optimizer state.

    Unless `is_due` is None, this calls `update` twice, and XLA removes the computations whose
    results are not used.
    """
    if is_due is None:
        return update(params, opt_state)
    choose = functools.partial(jnp.where, is_due)
    new_params = jax.tree.map(choose, update(params, opt_state)[0], params)
    new_params, opt_state = jax.lax.optimization_barrier((new_params, opt_state))
    return new_params, jax.tree.map(choose, update(params, opt_state)[1], opt_state)


def global_norm(gradients: Params) -> jax.Array:
    """Return the L2 norm over all arrays, as a scalar of the same dtype.

    If any array is in host memory, layers are moved to the device one at a time. Otherwise, the
    arrays are sorted, so that the norm does not depend on how layers are grouped into modules. The
    sort key consists of the first component and the last two components of an array's path.
    """
    if any(map(is_in_host, jax.tree.leaves(gradients))):
        return layerwise_norm(gradients)

    def names(item: tuple[Any, jax.Array]) -> tuple[str, ...]:
        path = [key.key for key in item[0]]
        return path[0], *path[-2:]

    leaves = sorted(jax.tree.leaves_with_path(gradients), key=names)
    return optax.tree.norm([leaf for _, leaf in leaves])


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
