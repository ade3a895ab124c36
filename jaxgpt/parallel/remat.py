"""Which activations of a layer are kept for its backward pass, and which are computed again."""

from collections.abc import Callable
from typing import Any

import jax

from jaxgpt.models.attention import Attention

# Results that cost a conversation between devices along `tensor`.
_SUMS = ("psum", "psum_invariant", "reduce_scatter")


def rematerialized(layer: Callable[..., Any], remat: str, in_loop: bool) -> Callable[..., Any]:
    """The same layer, which keeps less for its backward pass.

    Args:
        remat: parallel.remat. `none` keeps everything, and so does `attention` here, which
            `without_scores` takes care of; `dots` keeps the results of the linear layers and of
            sums over devices; `full` nothing but the layer's input.
        in_loop: the layer is the body of a loop, where XLA cannot merge the two computations.
    """

    def keep(primitive: Any, *args: Any, **params: Any) -> bool:
        is_dot = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        return is_dot(primitive, *args, **params) or primitive.name in _SUMS

    if remat in ("none", "attention"):
        return layer
    policy = keep if remat == "dots" else jax.checkpoint_policies.nothing_saveable
    return jax.checkpoint(layer, policy=policy, prevent_cse=not in_loop)


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
