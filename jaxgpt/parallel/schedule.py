"""Schedules: the order in which the pieces of a network process the microbatches of a step.

A schedule runs inside `jax.shard_map`, on one device's part of everything. `accumulate` is the
schedule of devices that hold all layers.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

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


class Objective(NamedTuple):
    """The function of the parameters that a schedule differentiates."""

    make_pieces: Callable[[Params, Params], Pieces]
    """(gradient accumulators, parameters) -> the network. Its gradient with respect to the
    accumulators is that of the parameters, reduced and sharded as the accumulators are."""
    scalar: Callable[[Any], jax.Array]  # `LossParts` -> float32 scalar
    adds_in_place: bool = False  # whether the backward pass adds to the accumulators it is given


class Microbatches(NamedTuple):
    """This device's part of the global batch, to be processed in n parts.

    Microbatch i consists of the rows i, i + n, ... of each device, and so of the global batch.
    """

    batch: Any
    n: int
    key: jax.Array  # for dropout


class Schedule(NamedTuple):
    """How devices run the blocks of a network: all of them, or each its own."""

    run_all_blocks: Callable[[Pieces, Any, jax.Array | None], tuple[jax.Array, dict[str, Any]]]
    """(pieces, batch, dropout key) -> x_BTD after the last block of the network, and auxiliary
    losses (B,), on every device."""
    gradients: Callable[[Objective, Params, Params, Microbatches], tuple[Any, Params]]
    """(objective, parameters, gradient accumulators, microbatches) -> `LossParts` and gradients,
    summed over this device's rows."""


def run_all_blocks(
    pieces: Pieces, batch: Any, key: jax.Array | None = None
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Run the network up to the head on a device that holds all layers; see `Schedule`."""
    return pieces.run_blocks(pieces.embed(batch, key), batch, key)


def accumulate(
    objective: Objective, params: Params, accumulators: Params, microbatches: Microbatches
) -> tuple[Any, Params]:
    """Process one microbatch after another, and add up their gradients; see `Schedule`."""
    batch, n, key = microbatches

    def loss(accumulators: Params, params: Params, batch: Any) -> tuple[jax.Array, Any]:
        pieces = objective.make_pieces(accumulators, params)
        x_BTD, aux = run_all_blocks(pieces, batch, key)
        parts = pieces.head_loss(x_BTD, batch).add(aux)
        return objective.scalar(parts), parts

    value_and_grad = jax.value_and_grad(loss, has_aux=True)
    if n == 1:
        (_, parts), gradients = value_and_grad(accumulators, params, batch)
        return parts, gradients

    def add(total: Params, microbatch: Any) -> tuple[Params, Any]:
        # The barrier keeps XLA from gathering all weights of ZeRO-3 once, before the loop.
        here = jax.tree.map(
            lambda param: jax.lax.optimization_barrier((param, microbatch.rows))[0], params
        )
        if objective.adds_in_place:
            (_, parts), total = value_and_grad(total, here, microbatch)
            return total, parts
        (_, parts), gradients = value_and_grad(accumulators, here, microbatch)
        return jax.tree.map(jnp.add, total, gradients), parts

    gradients, parts = jax.lax.scan(add, accumulators, split_microbatches(batch, n))
    parts = parts._replace(loss=parts.loss.sum(), rows=merge_microbatches(parts.rows))
    return parts, gradients


ACCUMULATE = Schedule(run_all_blocks, accumulate)


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
