"""Schedules: the order in which the pieces of a network process the microbatches of a step.

A schedule takes a network in pieces, its parameters and a batch, and returns the parts of the loss
and the gradients, all summed over this device's rows. It runs inside of `jax.shard_map`.
"""

from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jaxgpt.parallel.sharding import Params


class Pieces(Protocol):
    """A network with its parameters; see `models.transformer.GPT`."""

    def embed(self, batch: Any, key: jax.Array | None) -> jax.Array: ...

    def run_blocks(
        self, x_BTD: jax.Array, batch: Any, key: jax.Array | None
    ) -> tuple[jax.Array, dict[str, jax.Array]]: ...

    def head_loss(self, x_BTD: jax.Array, batch: Any) -> Any: ...


def forward_loss(pieces: Pieces, batch: Any, key: jax.Array | None = None) -> Any:
    """Return the `LossParts` of a batch; dropout only with a key."""
    x_BTD, _ = pieces.run_blocks(pieces.embed(batch, key), batch, key)
    return pieces.head_loss(x_BTD, batch)


def accumulate(
    make_pieces: Callable[[Params, Params], Pieces],
    objective: Callable[[Any], jax.Array],
    zeros: Params,
    params: Params,
    batch: Any,
    key: jax.Array,
    n_microbatches: int,
    adds_in_place: bool = False,
) -> tuple[Any, Params]:
    """Process one microbatch after another, and add their gradients up.

    Microbatch i of n consists of the rows i, i + n, ... of each device, and so of the global batch.

    Args:
        make_pieces: takes gradient accumulators and parameters; gradients are those of the
            accumulators.
        objective: the scalar to differentiate, from `LossParts`.
        zeros: the accumulators.
        batch: this device's part of the global batch.
        key: for dropout.
        adds_in_place: whether the backward pass adds to the accumulators that it is given.
    """

    def loss(zeros: Params, params: Params, batch: Any) -> tuple[jax.Array, Any]:
        parts = forward_loss(make_pieces(zeros, params), batch, key)
        return objective(parts), parts

    value_and_grad = jax.value_and_grad(loss, has_aux=True)
    if n_microbatches == 1:
        (_, parts), gradients = value_and_grad(zeros, params, batch)
        return parts, gradients

    def add(total: Params, microbatch: Any) -> tuple[Params, Any]:
        # The barrier keeps XLA from gathering all weights of ZeRO-3 once, before the loop.
        here = jax.tree.map(
            lambda param: jax.lax.optimization_barrier((param, microbatch.rows))[0], params
        )
        if adds_in_place:
            (_, parts), total = value_and_grad(total, here, microbatch)
            return total, parts
        (_, parts), gradients = value_and_grad(zeros, here, microbatch)
        return jax.tree.map(jnp.add, total, gradients), parts

    gradients, parts = jax.lax.scan(add, zeros, split_microbatches(batch, n_microbatches))
    parts = parts._replace(loss=parts.loss.sum(), rows=merge_microbatches(parts.rows))
    return parts, gradients


def split_microbatches(arrays: Any, n_parts: int) -> Any:
    """Split arrays (B, ...) into (n_parts, B / n_parts, ...).

    Part i holds the rows i, i + n_parts, ...
    """

    def split(x: jax.Array) -> jax.Array:
        return x.reshape(x.shape[0] // n_parts, n_parts, *x.shape[1:]).swapaxes(0, 1)

    return jax.tree.map(split, arrays)


def merge_microbatches(arrays: Any) -> Any:
    """Merge arrays (n_parts, B / n_parts, ...) to (B, ...), the inverse of `split_microbatches`."""
    return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(-1, *x.shape[2:]), arrays)
