"""Rematerialization: what a layer saves for its backward pass, and what it recomputes."""

from collections.abc import Callable
from typing import Any

import jax

COMMUNICATED = ("psum", "psum_invariant", "reduce_scatter")  # primitives that sum over `tensor`


def rematerialized(layer: Callable[..., Any], remat: str, in_loop: bool) -> Callable[..., Any]:
    """Wrap a layer so that it saves less for its backward pass.

    Args:
        remat: value of parallel.remat. `full` saves only the layer's inputs. `dots` also saves the
            outputs of the primitives in `COMMUNICATED` and of matmuls without batch dims. `none`
            and `attention` leave the layer unchanged; `without_scores` in kernels/attention.py
            implements `attention`.
        in_loop: whether the layer runs inside `jax.lax.scan`. In a scan, XLA cannot merge
            recomputed operations with the originals, so no barrier is needed.
    """

    def keep(primitive: Any, *args: Any, **params: Any) -> bool:
        is_dot = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        return is_dot(primitive, *args, **params) or primitive.name in COMMUNICATED

    if remat in ("none", "attention"):
        return layer
    policy = keep if remat == "dots" else jax.checkpoint_policies.nothing_saveable
    return jax.checkpoint(layer, policy=policy, prevent_cse=not in_loop)
