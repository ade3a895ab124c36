"""The output layer and the cross-entropy loss, computed for all tokens at once or in chunks."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxgpt.config import ModelConfig
from jaxgpt.kernels.softmax import max_and_sum_exp
from jaxgpt.parallel.tensor import NO_PARALLELISM, ParallelContext


class LossParts(NamedTuple):
    """Sums over the tokens of a batch or of one device's shard of a batch."""

    loss: jax.Array  # weighted cross-entropy in nats: float32 scalar
    rows: dict[str, jax.Array]  # float32 (B,): each row's `loss` in nats, and other metrics
    aux: dict[str, jax.Array]  # auxiliary losses of the blocks; see `mlp.AuxLosses`


class TokenScores(NamedTuple):
    """The loss and the most likely token at each position."""

    losses_BT: jax.Array  # weighted -log p(target) in nats, float32
    # int32 ID of the token with the largest logit; if tied, the lowest ID. If a logit is NaN, this
    # is unspecified and may be outside the vocabulary.
    likeliest_BT: jax.Array


class OutputLayer(NamedTuple):
    """One device's shard of the layer that computes logits from hidden states."""

    w_VD: jax.Array  # the weight's rows for this device's shard of the vocabulary
    vocab_offset: Any  # token ID of the shard's first row
    config: ModelConfig
    parallel: ParallelContext = NO_PARALLELISM

    def logits(self, x_BTD: jax.Array) -> jax.Array:
        """Return logits_BTV in float32 for this device's vocabulary shard; padding is -inf.

        Logits are rounded to the operands' dtype (before a soft cap), as in nanoGPT and llm.c. With
        unrounded logits, a GPT-2 step on a GPU would move 7% more bytes.
        """
        logits_BTV = jnp.einsum("...D,VD->...V", x_BTD, self.w_VD)  # B/b T V/t
        logits_BTV = logits_BTV.astype(jnp.float32)
        if (cap := self.config.logit_softcap) is not None:
            logits_BTV = cap * jnp.tanh(logits_BTV / cap)
        is_token_V = self.vocab_offset + jnp.arange(self.w_VD.shape[0]) < self.config.vocab_size
        return jnp.where(is_token_V, logits_BTV, -jnp.inf)

    def losses(
        self, x_BTD: jax.Array, targets_BT: jax.Array, weights_BT: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return the weighted loss of each target, float32 (B, T), and this device's logits_BTV.

        A target's loss is its `cross_entropy` in nats, multiplied by its weight. A target with
        weight 0 has a loss of 0, even if its cross-entropy is not finite.
        """
        logits_BTV = self.logits(x_BTD)
        losses_BT = cross_entropy(logits_BTV, targets_BT, self.vocab_offset, self.parallel)
        return jnp.where(weights_BT == 0, 0, weights_BT * losses_BT), logits_BTV


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def cross_entropy(
    logits_BTV: jax.Array,
    targets_BT: jax.Array,
    vocab_offset: Any = 0,
    parallel: ParallelContext = NO_PARALLELISM,
) -> jax.Array:
    """Return -log softmax(logits)[target] in nats, float32 (B, T).

    Devices with different vocabulary shards communicate only three arrays of shape (B, T): the
    maximum of the logits, the sum of their exponentials, and the target's logit (arXiv 1909.08053,
    section 3).

    Args:
        logits_BTV: the float32 logits of this device's vocabulary shard.
        targets_BT: int32 token IDs. The logit of an ID outside all shards counts as 0.
        vocab_offset: token ID of the shard's first logit.
        parallel: the devices over which the vocabulary is sharded.
    """
    return _cross_entropy_forward(logits_BTV, targets_BT, vocab_offset, parallel)[0]


def _cross_entropy_forward(
    logits_BTV: jax.Array, targets_BT: jax.Array, vocab_offset: Any, parallel: ParallelContext
) -> tuple[jax.Array, tuple[Any, ...]]:
    own_BT, sums_BT = max_and_sum_exp(logits_BTV)
    largest_BT = parallel.pmax(own_BT)
    # If all of a device's vocabulary rows are padding, its maximum is -inf.
    sums_BT = jnp.where(own_BT == -jnp.inf, 0.0, sums_BT * jnp.exp(own_BT - largest_BT))
    is_target_BTV = _is_target(logits_BTV, targets_BT, vocab_offset)
    target_BT = jnp.where(is_target_BTV, logits_BTV, 0.0).sum(axis=-1)
    sums_BT, target_BT = parallel.psum((sums_BT, target_BT))  # +t -> B/b T
    losses_BT = jnp.log(sums_BT) + largest_BT - target_BT
    return losses_BT, (logits_BTV, targets_BT, vocab_offset, largest_BT, sums_BT)


def _cross_entropy_backward(
    parallel: ParallelContext, kept: tuple[Any, ...], d_BT: jax.Array
) -> tuple[jax.Array, None, None]:
    """Return d_BT * (softmax(logits) - one_hot(target)) for this device's vocabulary shard."""
    del parallel  # no communication is needed
    logits_BTV, targets_BT, vocab_offset, largest_BT, sums_BT = kept
    softmax_BTV = jnp.exp(logits_BTV - largest_BT[..., None]) * (d_BT / sums_BT)[..., None]
    is_target_BTV = _is_target(logits_BTV, targets_BT, vocab_offset)
    return softmax_BTV - jnp.where(is_target_BTV, d_BT[..., None], 0.0), None, None


def _is_target(logits_BTV: jax.Array, targets_BT: jax.Array, vocab_offset: Any) -> jax.Array:
    return vocab_offset + jnp.arange(logits_BTV.shape[-1]) == targets_BT[..., None]


cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)


def loss_parts(
    x_BTD: jax.Array,
    targets_BT: jax.Array,
    weights_BT: jax.Array,
    output: OutputLayer,
    chunk: int,
) -> LossParts:
    """Return sums of the weighted cross-entropy: one over all targets, and one for each row.

    To add metrics computed from the logits, extend this function (see train/README.md).

    Args:
        x_BTD: the output layer's input.
        targets_BT: int32 token IDs.
        weights_BT: float32 weight of each target.
        output: the output layer.
        chunk: maximum number of tokens to process at a time, which limits the memory for logits. 0
            means all tokens at once.

    Returns:
        `LossParts` without auxiliary losses. `rows` has only `loss`, which has no gradient if the
        tokens are processed in chunks.
    """

    def loss_of(x_ND, w_VD, targets_N, weights_N, vocab_offset):
        layer = output._replace(w_VD=w_VD, vocab_offset=vocab_offset)
        losses_N, _ = layer.losses(x_ND, targets_N, weights_N)
        return losses_N.sum(), {"loss": losses_N}

    operands = x_BTD, targets_BT, weights_BT
    if chunk == 0 or chunk >= targets_BT.size:
        x, targets, weights = operands
        loss, tokens = loss_of(x, output.w_VD, targets, weights, output.vocab_offset)
    else:
        x, targets, weights = _split_chunks(operands, chunk)
        loss, tokens = _chunked_loss(loss_of, x, output.w_VD, targets, weights, output.vocab_offset)
        tokens = _merge_chunks(tokens, targets_BT.shape)
    return LossParts(loss, {"loss": tokens["loss"].sum(axis=1)}, aux={})


def score_tokens(
    x_BTD: jax.Array,
    targets_BT: jax.Array,
    weights_BT: jax.Array,
    output: OutputLayer,
    chunk: int,
) -> TokenScores:
    """Return each target's loss and the most likely token at each position; see `loss_parts`."""

    def score(part: tuple[jax.Array, jax.Array, jax.Array]) -> TokenScores:
        losses_N, logits_NV = output.losses(*part)
        return TokenScores(losses_N, _likeliest_token(logits_NV, output))

    operands = x_BTD, targets_BT, weights_BT
    if chunk == 0 or chunk >= targets_BT.size:
        return score(operands)
    return _merge_chunks(jax.lax.map(score, _split_chunks(operands, chunk)), targets_BT.shape)


def _likeliest_token(logits_BTV: jax.Array, output: OutputLayer) -> jax.Array:
    """Return the token ID of the largest logit (in a tie, the lowest ID), int32 (B, T)."""
    largest_BT = output.parallel.pmax(logits_BTV.max(axis=-1))
    ids_V = jnp.asarray(output.vocab_offset + jnp.arange(logits_BTV.shape[-1]), jnp.int32)
    is_largest_BTV = logits_BTV == largest_BT[..., None]
    first_BT = jnp.where(is_largest_BTV, ids_V, jnp.iinfo(jnp.int32).max).min(axis=-1)
    return -output.parallel.pmax(-first_BT)


def _split_chunks(arrays_BT: Any, chunk: int) -> Any:
    """Split arrays (B, T, ...) into P equal chunks of N <= `chunk` tokens: (P, N, ...).

    P is as small as possible. The last chunk is padded with zeros, so padding tokens have weight 0.
    The last array must have the shape (B, T).
    """
    n = jax.tree.leaves(arrays_BT)[-1].size
    parts = -(-n // chunk)
    size = -(-n // parts)

    def split(x_BT: jax.Array) -> jax.Array:
        x_N = x_BT.reshape(n, *x_BT.shape[2:])
        x_N = jnp.pad(x_N, ((0, parts * size - n), *((0, 0),) * (x_N.ndim - 1)))
        return x_N.reshape(parts, size, *x_N.shape[1:])

    return jax.tree.map(split, arrays_BT)


def _merge_chunks(values_PN: Any, shape: tuple[int, int]) -> Any:
    """Undo `_split_chunks`: join chunks (P, N) into arrays (B, T) without the padding."""
    B, T = shape
    return jax.tree.map(lambda x_PN: x_PN.reshape(-1)[: B * T].reshape(B, T), values_PN)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked_loss(loss_of, x_PND, w_VD, targets_PN, weights_PN, vocab_offset):
    """Apply `loss_of` to one chunk after another. Return the summed loss, and the other results.

    Each chunk's gradient is computed together with its loss, so logits are computed only once. Only
    one chunk's logits are in memory at a time.
    """

    def add(total, part):
        x_ND, targets_N, weights_N = part
        loss, aux = loss_of(x_ND, w_VD, targets_N, weights_N, vocab_offset)
        return total + loss, aux

    zero = jnp.zeros_like(targets_PN, jnp.float32, shape=())
    return jax.lax.scan(add, zero, (x_PND, targets_PN, weights_PN))


def _chunked_loss_forward(loss_of, x_PND, w_VD, targets_PN, weights_PN, vocab_offset):
    value_and_grad = jax.value_and_grad(loss_of, argnums=(0, 1), has_aux=True)

    def add(totals, part):
        x_ND, targets_N, weights_N = part
        (loss, aux), (dx_ND, dw_VD) = value_and_grad(x_ND, w_VD, targets_N, weights_N, vocab_offset)
        return (totals[0] + loss, totals[1] + dw_VD.astype(jnp.float32)), (dx_ND, aux)

    zeros = jnp.zeros_like(targets_PN, jnp.float32, shape=()), jnp.zeros_like(w_VD, jnp.float32)
    (loss, dw_VD), (dx_PND, aux) = jax.lax.scan(add, zeros, (x_PND, targets_PN, weights_PN))
    return (loss, aux), (dx_PND, dw_VD.astype(w_VD.dtype))


def _chunked_loss_backward(loss_of, gradients, cotangents):
    d_loss, _ = cotangents
    dx_PND, dw_VD = ((d * d_loss).astype(d.dtype) for d in gradients)
    return dx_PND, dw_VD, None, None, None


_chunked_loss.defvjp(_chunked_loss_forward, _chunked_loss_backward)
