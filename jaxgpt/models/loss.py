"""Cross-entropy on a vocabulary that may be sharded over devices, at once or in chunks."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxgpt.config import ModelConfig
from jaxgpt.models.transformer import logits
from jaxgpt.parallel.tensor import NO_PARALLELISM, ParallelContext

NO_TOKEN = -1  # a target that does not count: padding of the last chunk, row or batch


def cross_entropy(
    logits_BTV: jax.Array,
    targets_BT: jax.Array,
    vocab_offset: Any = 0,
    parallel: ParallelContext = NO_PARALLELISM,
) -> jax.Array:
    """Return -log softmax(logits)[target] in nats, shape (B, T).

    The logits stay where they are: only their maximum, the sum of their exponentials and the
    target's logit, numbers of shape (B, T), are communicated (arXiv 1909.08053, section 3).
    The first of them is that of token `vocab_offset`.
    """
    largest_BT = parallel.pmax(jax.lax.stop_gradient(logits_BTV).max(axis=-1))
    sums_BT = jnp.exp(logits_BTV - largest_BT[..., None]).sum(axis=-1)
    is_target_BTV = vocab_offset + jnp.arange(logits_BTV.shape[-1]) == targets_BT[..., None]
    target_BT = jnp.where(is_target_BTV, logits_BTV, 0.0).sum(axis=-1)
    sums_BT, target_BT = parallel.psum((sums_BT, target_BT))
    return jnp.log(sums_BT) + largest_BT - target_BT


def cross_entropy_sum(
    x_BTD: jax.Array,
    w_VD: jax.Array,
    targets_BT: jax.Array,
    vocab_offset: Any,
    config: ModelConfig,
    parallel: ParallelContext,
    chunk: int,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return the cross-entropy summed over all tokens, from the operands of the output layer.

    Args:
        chunk: number of tokens to compute at a time, so that only their logits are in memory; 0
            computes all tokens at once.

    Returns:
        (sum, auxiliary values of each row by name). The auxiliary values have the shape (B,) and
        are not differentiated. `loss` is the sum over the row's tokens; metrics of the logits are
        added here (train/README.md).
    """

    def loss_of(x_ND, w_VD, targets_N, vocab_offset):
        _, losses_N = _scores_and_losses(x_ND, w_VD, targets_N, vocab_offset, config, parallel)
        return losses_N.sum(), {"loss": losses_N}

    if chunk == 0 or chunk >= targets_BT.size:
        loss, tokens = loss_of(x_BTD, w_VD, targets_BT, vocab_offset)
    else:
        x_PND, targets_PN = split_chunks(x_BTD, targets_BT, chunk)
        loss, tokens = _chunked_loss(loss_of, x_PND, w_VD, targets_PN, vocab_offset)
        tokens = jax.tree.map(lambda x_PN: _merge_chunks(x_PN, targets_BT.shape), tokens)
    return loss, {"loss": tokens["loss"].sum(axis=1)}


def _scores_and_losses(
    x_ND: jax.Array,
    w_VD: jax.Array,
    targets_N: jax.Array,
    vocab_offset: Any,
    config: ModelConfig,
    parallel: ParallelContext,
) -> tuple[jax.Array, jax.Array]:
    """Return this device's logits, and the loss of each target; 0 where that is `NO_TOKEN`."""
    scores_NV = logits(x_ND, w_VD, vocab_offset, config)
    losses_N = cross_entropy(scores_NV, targets_N, vocab_offset, parallel)
    return scores_NV, jnp.where(targets_N == NO_TOKEN, 0, losses_N)


class TokenScores(NamedTuple):
    """The loss and the likeliest token at each position."""

    losses_BT: jax.Array  # -log p(target) in nats, float32; 0 where the target is `NO_TOKEN`
    likeliest_BT: jax.Array  # the token with the largest logit, int32; the first of several


def score_tokens(
    x_BTD: jax.Array,
    w_VD: jax.Array,
    targets_BT: jax.Array,
    vocab_offset: Any,
    config: ModelConfig,
    parallel: ParallelContext,
    chunk: int,
) -> TokenScores:
    """Return the scores of all targets; arguments as for `cross_entropy_sum`."""

    def score(part: tuple[jax.Array, jax.Array]) -> TokenScores:
        x_ND, targets_N = part
        scores_NV, losses_N = _scores_and_losses(
            x_ND, w_VD, targets_N, vocab_offset, config, parallel
        )
        return TokenScores(losses_N, likeliest_token(scores_NV, vocab_offset, parallel))

    if chunk == 0 or chunk >= targets_BT.size:
        return score((x_BTD, targets_BT))
    found = jax.lax.map(score, split_chunks(x_BTD, targets_BT, chunk))
    return jax.tree.map(lambda x_PN: _merge_chunks(x_PN, targets_BT.shape), found)


def likeliest_token(
    logits_BTV: jax.Array, vocab_offset: Any, parallel: ParallelContext
) -> jax.Array:
    """Return argmax over a vocabulary that may be split over devices: int32 (B, T)."""
    largest_BT = parallel.pmax(logits_BTV.max(axis=-1))
    ids_V = jnp.asarray(vocab_offset + jnp.arange(logits_BTV.shape[-1]), jnp.int32)
    is_largest_BTV = logits_BTV == largest_BT[..., None]
    first_BT = jnp.where(is_largest_BTV, ids_V, jnp.iinfo(jnp.int32).max).min(axis=-1)
    return -parallel.pmax(-first_BT)


def split_chunks(
    x_BTD: jax.Array, targets_BT: jax.Array, chunk: int
) -> tuple[jax.Array, jax.Array]:
    """Return x_PND and targets_PN, in P chunks of at most `chunk` tokens.

    They are as even as they get: what fills up the last one, `NO_TOKEN`, is computed too.
    """
    n, D = targets_BT.size, x_BTD.shape[-1]
    parts = -(-n // chunk)
    chunk = -(-n // parts)
    padding = parts * chunk - n
    x_PND = jnp.pad(x_BTD.reshape(n, D), ((0, padding), (0, 0))).reshape(parts, chunk, D)
    targets_PN = jnp.pad(targets_BT.reshape(n), (0, padding), constant_values=NO_TOKEN)
    return x_PND, targets_PN.reshape(parts, chunk)


def _merge_chunks(x_PN: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """Return values of tokens in their shape before `split_chunks`, without those of padding."""
    return x_PN.reshape(-1)[: math.prod(shape)].reshape(shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked_loss(loss_of, x_PND, w_VD, targets_PN, vocab_offset):
    """Return the sum of `loss_of` over P chunks, one after the other, and its auxiliary results.

    A chunk's gradient is computed along with its loss, while its logits exist: neither do the
    logits of all chunks ever exist, nor are any computed twice.
    """

    def add(total, part):
        loss, aux = loss_of(part[0], w_VD, part[1], vocab_offset)
        return total + loss, aux

    zero = jnp.zeros_like(targets_PN, jnp.float32, shape=())
    return jax.lax.scan(add, zero, (x_PND, targets_PN))


def _chunked_loss_forward(loss_of, x_PND, w_VD, targets_PN, vocab_offset):
    value_and_grad = jax.value_and_grad(loss_of, argnums=(0, 1), has_aux=True)

    def add(totals, part):
        (loss, aux), (dx_ND, dw_VD) = value_and_grad(part[0], w_VD, part[1], vocab_offset)
        return (totals[0] + loss, totals[1] + dw_VD.astype(jnp.float32)), (dx_ND, aux)

    zeros = jnp.zeros_like(targets_PN, jnp.float32, shape=()), jnp.zeros_like(w_VD, jnp.float32)
    (loss, dw_VD), (dx_PND, aux) = jax.lax.scan(add, zeros, (x_PND, targets_PN))
    return (loss, aux), (dx_PND, dw_VD.astype(w_VD.dtype))


def _chunked_loss_backward(loss_of, gradients, cotangents):
    d_loss, _ = cotangents
    dx_PND, dw_VD = gradients
    return (dx_PND * d_loss).astype(dx_PND.dtype), (dw_VD * d_loss).astype(dw_VD.dtype), None, None


_chunked_loss.defvjp(_chunked_loss_forward, _chunked_loss_backward)
