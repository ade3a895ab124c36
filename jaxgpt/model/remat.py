"""Which activations of a layer are kept for its backward pass, and which are computed again."""

from collections.abc import Callable
from typing import Any

import jax

from jaxgpt.model.attention import Attention

# Results that cost a conversation between devices along `tensor`.
_SUMS = ("psum", "psum_invariant", "reduce_scatter")


def rematerialized(
    layer: Callable[..., Any], remat: str, gather_again: bool, in_loop: bool
) -> Callable[..., Any]:
    """The same layer, which keeps less for its backward pass.

    Args:
        remat: parallel.remat. `none` and `attention` keep everything here (attention is taken
            care of in `without_scores`); `dots` the results of the linear layers and of sums over
            devices; `full` nothing but the layer's input.
        gather_again: whatever is kept, what was gathered from other devices is not.
        in_loop: the layer is the body of a loop, where XLA cannot merge the two computations.
    """
    policies = jax.checkpoint_policies

    def keep(primitive: Any, *args: Any, **params: Any) -> bool:
        if gather_again and _gathers(primitive, params):
            return False
        if remat == "full":
            return False
        if remat == "dots":
            is_dot = policies.dots_with_no_batch_dims_saveable(primitive, *args, **params)
            return is_dot or primitive.name in _SUMS
        return True

    if remat in ("none", "attention") and not gather_again:
        return layer
    return jax.checkpoint(layer, policy=keep, prevent_cse=not in_loop)


def _gathers(primitive: Any, params: dict[str, Any]) -> bool:
    """Whether this is an all-gather, or a function with its own gradient that makes one."""
    inside = params["call_jaxpr"].eqns if primitive.name == "custom_vjp_call" else ()
    return primitive.name == "all_gather" or any(_gathers(e.primitive, e.params) for e in inside)


def without_scores(attend: Attention) -> Attention:
    """Attention that computes its T x T scores again for the backward pass.

    The selective recomputation of arXiv 2205.05198, section 5.
    """

    @jax.custom_vjp
    def forgetful(q_BTHK, k_BTHK, v_BTHK, keys_BH):
        return attend(q_BTHK, k_BTHK, v_BTHK, keys_BH)

    def forward(*operands):
        return attend(*operands), operands

    def backward(operands, d_out_BTHK):
        # The barrier keeps XLA from computing the scores before their turn, and keeping them.
        operands, d_out_BTHK = jax.lax.optimization_barrier((operands, d_out_BTHK))
        *qkv, keys_BH = operands
        return *jax.vjp(lambda *qkv: attend(*qkv, keys_BH), *qkv)[1](d_out_BTHK), None

    forgetful.defvjp(forward, backward)
    return forgetful
