"""Schedules, which run the forward and backward passes of all microbatches in a step.

A schedule runs inside `jax.shard_map`, so its arrays are this device's shards. `ACCUMULATE` is the
schedule for devices that hold all layers. See `pipeline.py` for pipeline schedules.
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
        self,
        x_BTD: jax.Array,
        batch: Any,
        key: jax.Array | None,
        layers: tuple[Any, Any] = ...,
    ) -> tuple[jax.Array, dict[str, jax.Array]]: ...

    def head_loss(self, x_BTD: jax.Array, batch: Any) -> Any: ...


class Objective(NamedTuple):
    """The function that a schedule differentiates."""

    make_pieces: Callable[[Params, Params], Pieces]
    """(gradient accumulators, parameters) -> network. The forward pass does not read the
    accumulators. The gradient with respect to them is the gradient of the parameters, sharded like
    the accumulators and reduced as described in `all_gather_param`."""
    scalar: Callable[[Any], jax.Array]  # `LossParts` -> float32 scalar, linear in the losses
    adds_in_place: bool = False  # True if gradients include the accumulators' values


class Microbatches(NamedTuple):
    """This device's part of the global batch, to be processed as n microbatches.

    Microbatch i consists of every n-th row of each device, starting at row i. This is also every
    n-th row of the global batch, starting at row i.
    """

    batch: Any
    n: int
    key: jax.Array  # dropout key of the step


class Schedule(NamedTuple):
    """Functions that run the network for evaluation and for training."""

    run_all_blocks: Callable[[Pieces, Any, jax.Array | None], tuple[jax.Array, dict[str, Any]]]
    """The forward pass, for evaluation: (pieces, batch, dropout key) -> (x_BTD after the network's
    last block, auxiliary losses (B,) by name), on every device."""
    gradients: Callable[[Objective, Params, Params, Microbatches], tuple[Any, Params]]
    """The forward and backward passes, for training: (objective, parameters, gradient accumulators,
    microbatches) -> (`LossParts`, gradients). The `LossParts` are sums over this device's part of
    the batch. The gradients are described in `Objective`. The accumulators must be 0."""


def run_all_blocks(
    pieces: Pieces, batch: Any, key: jax.Array | None = None
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Run the embedding and all blocks on a device that holds all layers; see `Schedule`.

    If `key` is None, there is no dropout.
    """
    return pieces.run_blocks(pieces.embed(batch, key), batch, key)


def accumulate(
    objective: Objective, params: Params, grad_accumulators: Params, microbatches: Microbatches
) -> tuple[Any, Params]:
    """Compute and sum the losses and gradients of the microbatches; see `Schedule`.

    Per-row losses are in the order of the batch. `microbatches.n` must divide the number of rows.
    `grad_accumulators` must be all zeros.
    """
    batch, n, key = microbatches

    def loss(grad_accumulators: Params, params: Params, batch: Any) -> tuple[jax.Array, Any]:
        pieces = objective.make_pieces(grad_accumulators, params)
        x_BTD, aux = run_all_blocks(pieces, batch, key)
        parts = pieces.head_loss(x_BTD, batch)._replace(aux=aux)
        return objective.scalar(parts), parts

    value_and_grad = jax.value_and_grad(loss, has_aux=True)
    if n == 1:
        (_, parts), gradients = value_and_grad(grad_accumulators, params, batch)
        return parts, gradients

    def add(total: Params, microbatch: Any) -> tuple[Params, Any]:
        # Without the barrier, XLA would gather all ZeRO-3 weights before the loop and keep them.
        here = jax.tree.map(
            lambda param: jax.lax.optimization_barrier((param, microbatch.rows))[0], params
        )
        if objective.adds_in_place:
            (_, parts), total = value_and_grad(total, here, microbatch)
            return total, parts
        (_, parts), gradients = value_and_grad(grad_accumulators, here, microbatch)
        return jax.tree.map(jnp.add, total, gradients), parts

    gradients, parts = jax.lax.scan(add, grad_accumulators, split_microbatches(batch, n))
    rows, aux = merge_microbatches((parts.rows, parts.aux))
    return parts._replace(loss=parts.loss.sum(), rows=rows, aux=aux), gradients


ACCUMULATE = Schedule(run_all_blocks, accumulate)


def split_microbatches(arrays: Any, n_parts: int) -> Any:
    """Split arrays (B, ...) into (n_parts, B / n_parts, ...).

    Part i holds rows i, i + n_parts, and so on. `n_parts` must divide B.
    """

    def split(x: jax.Array) -> jax.Array:
        return x.reshape(x.shape[0] // n_parts, n_parts, *x.shape[1:]).swapaxes(0, 1)

    return jax.tree.map(split, arrays)


def merge_microbatches(arrays: Any) -> Any:
    """Undo `split_microbatches`: merge arrays (n_parts, B / n_parts, ...) into (B, ...)."""
    return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(-1, *x.shape[2:]), arrays)
