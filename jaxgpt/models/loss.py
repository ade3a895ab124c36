"""Cross-entropy, on a vocabulary that may be split over devices, at once or in chunks."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxgpt.models.transformer import logits
from jaxgpt.parallel.tensor import ONE_DEVICE, OneDevice

NO_TOKEN = -1  # the target of what only fills up the last chunk


def cross_entropy(
    logits_BTV: jax.Array,
    targets_BT: jax.Array,
    first: Any = 0,
    devices: OneDevice = ONE_DEVICE,
) -> jax.Array:
    """-log softmax(logits)[target] in nats, shape (B, T).

    The logits stay where they are: only their maximum, the sum of their exponentials and the
    target's logit, numbers of shape (B, T), travel (arXiv 1909.08053, section 3).

    Args:
        logits_BTV: of this device's tokens: first, first + 1, ...
    """
    largest_BT = devices.max(jax.lax.stop_gradient(logits_BTV).max(axis=-1))
    sums_BT = jnp.exp(logits_BTV - largest_BT[..., None]).sum(axis=-1)
    is_target_BTV = first + jnp.arange(logits_BTV.shape[-1]) == targets_BT[..., None]
    target_BT = jnp.where(is_target_BTV, logits_BTV, 0.0).sum(axis=-1)
    sums_BT, target_BT = devices.sum((sums_BT, target_BT))
    return jnp.log(sums_BT) + largest_BT - target_BT


def summed_loss(
    x_BTD: jax.Array,
    w_VD: jax.Array,
    targets_BT: jax.Array,
    first: Any,
    vocab_size: int,
    devices: OneDevice,
    chunk: int,
) -> tuple[jax.Array, jax.Array]:
    """Cross-entropy summed over all tokens, from what the output layer multiplies.

    Args:
        chunk: tokens at a time, so that not all logits exist at once; 0 takes all.

    Returns:
        The sum, and the sums of the rows, shape (B,), which are not to be differentiated.
    """

    def summed(x_ND, w_VD, targets_N, first):
        scores_NV = logits(x_ND, w_VD, first, vocab_size)
        losses_N = cross_entropy(scores_NV, targets_N, first, devices)
        losses_N = jnp.where(targets_N == NO_TOKEN, 0, losses_N)
        return losses_N.sum(), losses_N

    n, D = targets_BT.size, x_BTD.shape[-1]
    if chunk == 0 or chunk >= n:
        loss, losses_BT = summed(x_BTD, w_VD, targets_BT, first)
        return loss, losses_BT.sum(axis=1)
    parts = -(-n // chunk)
    chunk = -(-n // parts)  # as even as they get: what fills up the last one is computed, too
    padding = parts * chunk - n
    x_PND = jnp.pad(x_BTD.reshape(n, D), ((0, padding), (0, 0))).reshape(parts, chunk, D)
    targets_PN = jnp.pad(targets_BT.reshape(n), (0, padding), constant_values=NO_TOKEN)
    targets_PN = targets_PN.reshape(parts, chunk)
    loss, losses_PN = _in_parts(summed, x_PND, w_VD, targets_PN, first)
    return loss, losses_PN.reshape(-1)[:n].reshape(targets_BT.shape).sum(axis=1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_parts(summed, x_PND, w_VD, targets_PN, first):
    """The sum of `summed` over P parts, one after the other, and every token's loss.

    The gradient is that of the sum. A part's gradient is computed along with its loss, while its
    logits are there: neither do the logits of all parts ever exist, nor are any computed twice.
    """

    def add(total, part):
        loss, losses_N = summed(part[0], w_VD, part[1], first)
        return total + loss, losses_N

    zero = jnp.zeros_like(targets_PN, jnp.float32, shape=())
    return jax.lax.scan(add, zero, (x_PND, targets_PN))


def _forward(summed, x_PND, w_VD, targets_PN, first):
    def add(totals, part):
        (loss, losses_N), (dx_ND, dw_VD) = jax.value_and_grad(summed, argnums=(0, 1), has_aux=True)(
            part[0], w_VD, part[1], first
        )
        totals = totals[0] + loss, totals[1] + dw_VD.astype(jnp.float32)
        return totals, (dx_ND, losses_N)

    zeros = jnp.zeros_like(targets_PN, jnp.float32, shape=()), jnp.zeros_like(w_VD, jnp.float32)
    (loss, dw_VD), (dx_PND, losses_PN) = jax.lax.scan(add, zeros, (x_PND, targets_PN))
    return (loss, losses_PN), (dx_PND, dw_VD.astype(w_VD.dtype))


def _backward(summed, gradients, cotangents):
    d_loss, _ = cotangents
    dx_PND, dw_VD = gradients
    return (dx_PND * d_loss).astype(dx_PND.dtype), (dw_VD * d_loss).astype(dw_VD.dtype), None, None


_in_parts.defvjp(_forward, _backward)
