"""Rematerialization: what of a layer is kept for its backward pass, and what is computed again."""

from collections.abc import Callable
from typing import Any

import jax

COMMUNICATED = ("psum", "psum_invariant", "reduce_scatter")  # sums over devices along `tensor`


def rematerialized(layer: Callable[..., Any], remat: str, in_loop: bool) -> Callable[..., Any]:
    """Return the same layer, which keeps less for its backward pass.

    Of parallel.remat's values, `none` keeps everything, and so does `attention` here, which
    `without_scores` takes care of; `dots` keeps the results of the linear layers and of sums over
    devices; `full` nothing but the layer's input. In a loop XLA cannot merge the two computations.
    """

    def keep(primitive: Any, *args: Any, **params: Any) -> bool:
        is_dot = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        return is_dot(primitive, *args, **params) or primitive.name in COMMUNICATED

    if remat in ("none", "attention"):
        return layer
    policy = keep if remat == "dots" else jax.checkpoint_policies.nothing_saveable
    return jax.checkpoint(layer, policy=policy, prevent_cse=not in_loop)
