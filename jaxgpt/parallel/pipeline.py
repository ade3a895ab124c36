"""Pipeline parallelism: stages hold different layers, and microbatches pass from stage to stage.

A pipeline is a `Schedule` that runs inside `jax.shard_map`. All stages run the same program, a scan
over ticks. In each tick, a stage runs one group of layers on one microbatch, and sends the result
to the next stage. If a stage has no microbatch in a tick (a bubble), it still computes a result,
which is not used.

- `gpipe` (arXiv 1811.06965): each stage holds one group of consecutive layers.
- `circular` (the interleaved schedule of arXiv 2104.04473, section 2.2): each stage holds v groups.
  Group g is on stage g mod S. Microbatches pass through the stages v times, so a bubble takes only
  1/v of the time that it takes with `gpipe`.

With M microbatches and S stages, a step has v M + S - 1 ticks. Each stage has S - 1 bubbles.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from jaxgpt.parallel.collectives import all_gather, reduce_scatter, varying
from jaxgpt.parallel.schedule import (
    Microbatches,
    Objective,
    Pieces,
    Schedule,
    merge_microbatches,
    split_microbatches,
)
from jaxgpt.parallel.sharding import Params, split_dim
from jaxgpt.parallel.zero import ShardedParam, all_gather_param


class LayerGroups(NamedTuple):
    """The division of a model's layers into S v groups of consecutive layers.

    Group g runs on stage g mod S. If the layers cannot be divided evenly, the first groups have one
    more layer (or layer pattern), and the other groups are padded.
    """

    n_layers: int
    n_stages: int  # S
    n_repeats: int  # v
    pattern: int = 1  # length of the layer pattern; divides n_layers and every group size

    @property
    def sizes(self) -> list[int]:
        """The number of layers in each group."""
        patterns, more = divmod(self.n_layers // self.pattern, self.n_stages * self.n_repeats)
        n_groups = self.n_stages * self.n_repeats
        return [self.pattern * (patterns + (group < more)) for group in range(n_groups)]

    @property
    def is_even(self) -> bool:
        return len(set(self.sizes)) == 1

    @property
    def is_contiguous(self) -> bool:
        """True if each stage has one group, and all groups have the same size."""
        return self.is_even and self.n_repeats == 1

    @property
    def firsts(self) -> np.ndarray:
        """The index of the first layer of each group: int (v, S)."""
        return self._by_repeat(np.cumsum([0, *self.sizes[:-1]]))

    @property
    def ends(self) -> np.ndarray:
        """The index after the last layer of each group: int (v, S)."""
        return self._by_repeat(np.cumsum(self.sizes))

    @property
    def layers(self) -> np.ndarray:
        """The indices of the layers that each stage runs, with padding: int (S, v max(sizes))."""
        layers = self.firsts[..., None] + np.arange(max(self.sizes))
        return np.minimum(layers, self.n_layers - 1).swapaxes(0, 1).reshape(self.n_stages, -1)

    @property
    def warnings(self) -> tuple[str, ...]:
        """A tuple with a warning if the groups differ in size; otherwise, an empty tuple."""
        if self.is_even:
            return ()
        large, small = max(self.sizes), min(self.sizes)
        n = self.sizes.count(large)
        return (
            f"model.n_layer={self.n_layers}: {n} of {len(self.sizes)} groups of layers hold "
            f"{large} layers, the others {small}; stages with fewer layers wait for the others",
        )

    def _by_repeat(self, of_groups: Sequence[int]) -> np.ndarray:
        return np.reshape(of_groups, (self.n_repeats, self.n_stages))


class Network(NamedTuple):
    """A stage's network, with its weights gathered once for all ticks of a step.

    The gradients with respect to the accumulators are not reduced over devices.
    """

    graph: nnx.GraphDef
    weights: Params  # nested dict of `ShardedParam`

    def pieces(self, **weights: Params) -> Pieces:
        """Return the network with some of its weights replaced."""
        return nnx.merge(self.graph, self.weights | weights)

    @property
    def accumulators(self) -> Params:
        """The gradient accumulators of the weights."""
        return jax.tree.map(lambda w: w.grad_accumulator, self.weights, is_leaf=is_sharded)

    def with_accumulators(self, accumulators: Params) -> "Network":
        """Return the network with other gradient accumulators."""

        def replace(weight: ShardedParam, accumulator: jax.Array) -> ShardedParam:
            return dataclasses.replace(weight, grad_accumulator=accumulator)

        weights = jax.tree.map(replace, self.weights, accumulators, is_leaf=is_sharded)
        return self._replace(weights=weights)


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """The schedule `gpipe` (one group of layers per stage) or `circular` (`groups.n_repeats`)."""

    groups: LayerGroups
    n_microbatches: int  # M
    axes: tuple[str, ...]  # mesh axes that split the layers

    @property
    def schedule(self) -> Schedule:
        """The `Schedule` that runs this pipeline."""
        return Schedule(self.run_all_blocks, self.gradients)

    def run_all_blocks(
        self, pieces: Pieces, batch: Any, key: jax.Array | None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Run the embedding and all blocks; see `Schedule`.

        A device's B rows are split into gcd(M, B) microbatches. All stages receive the results.
        """
        n = math.gcd(self.n_microbatches, batch.rows.shape[0])
        outputs, aux = self._run_ticks(self._load(pieces), split_microbatches(batch, n), key)
        return merge_microbatches(jax.lax.psum((self._keep_last(outputs), aux), self.axes))

    def gradients(
        self,
        objective: Objective,
        params: Params,
        grad_accumulators: Params,
        microbatches: Microbatches,
    ) -> tuple[Any, Params]:
        """Run the forward and backward passes of a step; see `Schedule`.

        Weights are gathered once per step. After the forward pass, the outputs of the last stage
        are scattered, and each stage computes the head and the loss for its share of the
        microbatches. The `LossParts` are equal on all stages. `grad_accumulators` must be all
        zeros, and `microbatches.n` must divide the number of rows. `objective.adds_in_place` must
        be False.
        """
        batch, M, key = microbatches
        batches = split_microbatches(batch, M)

        def load(grad_accumulators: Params) -> tuple[Params, Network]:
            network = self._load(objective.make_pieces(grad_accumulators, params))
            return network.accumulators, network

        def run(accumulators: Params) -> tuple[jax.Array, dict[str, jax.Array]]:
            outputs, aux = self._run_ticks(network.with_accumulators(accumulators), batches, key)
            return reduce_scatter(self._pad(self._keep_last(outputs)), self.axes, 0), aux

        accumulators, store, network = jax.vjp(load, grad_accumulators, has_aux=True)
        (outputs, aux), pull_back = jax.vjp(run, accumulators)
        parts, d_outputs, of_head = self._head(objective, network, outputs, self._share(batches))
        d_aux = jax.grad(lambda aux: objective.scalar(parts._replace(loss=0.0, aux=aux)))(aux)
        (gradients,) = pull_back((d_outputs, d_aux))
        outside = {name: jax.tree.map(jnp.add, gradients[name], g) for name, g in of_head.items()}
        (gradients,) = store(gradients | outside)
        loss, aux = jax.lax.psum((parts.loss.sum(), aux), self.axes)
        rows = jax.tree.map(lambda own: self._gather(own, M), parts.rows)
        rows, aux = merge_microbatches((rows, aux))
        return parts._replace(loss=loss, rows=rows, aux=aux), gradients

    def _head(
        self, objective: Objective, network: Network, outputs: jax.Array, batches: Any
    ) -> tuple[Any, jax.Array, Params]:
        """Compute the head, the loss and their gradients, one microbatch after another.

        Only one microbatch's logits are in memory at a time.

        Returns:
            The `LossParts` of all microbatches, stacked. The gradient with respect to `outputs`.
            The gradients with respect to the weights outside the layers.
        """
        accumulators = network.accumulators
        outside = {name: part for name, part in accumulators.items() if name != "layers"}

        def loss(outside: Params, x_BTD: jax.Array, batch: Any) -> tuple[jax.Array, Any]:
            pieces = network.with_accumulators(accumulators | outside).pieces()
            parts = pieces.head_loss(x_BTD, batch)
            return objective.scalar(parts), parts

        def add(total: Params, microbatch: tuple[jax.Array, Any]) -> tuple[Params, Any]:
            value_and_grad = jax.value_and_grad(loss, (0, 1), has_aux=True)
            (_, parts), (gradients, d_x_BTD) = value_and_grad(outside, *microbatch)
            return jax.tree.map(jnp.add, total, gradients), (parts, d_x_BTD)

        gradients, (parts, d_outputs) = jax.lax.scan(add, outside, (outputs, batches))
        return parts, d_outputs, gradients

    def _load(self, pieces: Pieces) -> Network:
        """Return the network with this stage's layers and with all weights gathered."""

        def gathered(param: ShardedParam) -> ShardedParam:
            layout = dataclasses.replace(param.layout, param=PartitionSpec(), accum=PartitionSpec())
            weight = jax.lax.stop_gradient(all_gather_param(param))
            return ShardedParam(weight, param.grad_accumulator, layout)

        def of_stage(param: ShardedParam) -> ShardedParam:
            used, dim = gathered(param), split_dim(param.layout.param, self.axes)
            arrays = used.shard, used.grad_accumulator
            return ShardedParam(*(self._exchange(x, dim) for x in arrays), used.layout)

        graph, state = nnx.split(pieces)
        weights = {
            name: jax.tree.map(of_stage if name == "layers" else gathered, part, is_leaf=is_sharded)
            for name, part in nnx.to_pure_dict(state).items()
        }
        return Network(graph, weights)

    def _run_ticks(
        self, network: Network, batches: Any, key: jax.Array | None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Run the embedding and all layers on all microbatches.

        Args:
            batches: arrays (M, B, ...).

        Returns:
            The hidden states (M, B, T, D) after the network's last block. They are valid only on
            the last stage. The auxiliary losses (M, B), summed over this stage's layers.
        """
        groups, S, M = self.groups, self.groups.n_stages, len(batches.rows)
        stage, period = jax.lax.axis_index(self.axes), max(M, S)
        n_ticks = (groups.n_repeats - 1) * period + M + S - 1
        n_waiting = period - S if groups.n_repeats > 1 else 0
        next_stage = [(s, (s + 1) % S) for s in range(S if groups.n_repeats > 1 else S - 1)]

        @functools.partial(jax.checkpoint, prevent_cse=False)
        def run(x_BTD: jax.Array, batch: Any, repeat: jax.Array) -> tuple[jax.Array, Any]:
            pieces = network.pieces(layers=self._group(network.weights["layers"], repeat))
            # All stages compute the embedding, because they run the same program.
            is_first = (stage == 0) & (repeat == 0)
            x_BTD = jnp.where(is_first, pieces.embed(batch, key), x_BTD)
            first, end = jnp.array(groups.firsts), jnp.array(groups.ends)
            layers = first[repeat, stage], None if groups.is_even else end[repeat, stage]
            return pieces.run_blocks(x_BTD, batch, key, layers)

        def tick(carry: Any, t: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
            received, waiting, outputs = carry
            if n_waiting:  # a microbatch waits until the last microbatch has passed the first stage
                oldest = waiting[t % n_waiting]
                waiting = waiting.at[t % n_waiting].set(received)
                received = jnp.where(stage == 0, oldest, received)
            repeat, number = (t - stage) // period, (t - stage) % period
            batch = jax.tree.map(lambda x: x[jnp.minimum(number, M - 1)], batches)
            x_BTD, aux = run(received, batch, jnp.clip(repeat, 0, groups.n_repeats - 1))
            # The last M ticks overwrite the results of earlier ticks.
            outputs = outputs.at[jnp.maximum(t - (n_ticks - M), 0)].set(x_BTD)
            return (jax.lax.ppermute(x_BTD, self.axes, next_stage), waiting, outputs), aux

        x_BTD = self._zeros(network.pieces(), batches)
        carry = x_BTD, *(jnp.broadcast_to(x_BTD, (n, *x_BTD.shape)) for n in (n_waiting, M))
        (_, _, outputs), aux = jax.lax.scan(tick, carry, jnp.arange(n_ticks))
        return outputs, jax.tree.map(lambda of_ticks: self._sum_repeats(of_ticks, M), aux)

    def _group(self, layers: Params, repeat: jax.Array) -> Params:
        """Return one of this stage's groups of layers."""
        if self.groups.n_repeats == 1:
            return layers
        n = max(self.groups.sizes)
        return jax.tree.map(lambda w: jax.lax.dynamic_slice_in_dim(w, repeat * n, n), layers)

    def _zeros(self, pieces: Pieces, batches: Any) -> jax.Array:
        """Return zeros with the shape of a microbatch's hidden states, marked as varying."""
        first = jax.tree.map(lambda x: x[0], batches)
        shape = jax.eval_shape(lambda: pieces.embed(first, None))
        parallel = pieces.parallel
        axes = {*self.axes, *(parallel.tensor_axes if parallel.sequence_parallel else ())}
        zeros = jnp.zeros_like(first.tokens, shape.dtype, shape=shape.shape)
        return varying(zeros, frozenset(axes))

    def _sum_repeats(self, of_ticks: jax.Array, M: int) -> jax.Array:
        """Sum values (ticks, B) over this stage's v groups. Return an array (M, B)."""
        v, period = self.groups.n_repeats, max(M, self.groups.n_stages)
        stage = jax.lax.axis_index(self.axes)
        own = jax.lax.dynamic_slice_in_dim(of_ticks, stage, (v - 1) * period + M)
        own = jnp.pad(own, ((0, period - M), (0, 0)))
        return own.reshape(v, period, -1)[:, :M].sum(axis=0)

    def _keep_last(self, x: jax.Array) -> jax.Array:
        """Return `x` on the last stage, and zeros on all others."""
        is_last = jax.lax.axis_index(self.axes) == self.groups.n_stages - 1
        return jnp.where(is_last, x, jnp.zeros_like(x))

    def _pad(self, x: jax.Array) -> jax.Array:
        """Append zeros to an array (M, ...) until M is a multiple of the number of stages.

        The padding does not contribute to the loss, because its `Batch.weights` are 0.
        """
        return jnp.pad(x, ((0, -len(x) % self.groups.n_stages), *((0, 0),) * (x.ndim - 1)))

    def _share(self, batches: Any) -> Any:
        """Return this stage's share of the microbatches, 1/S of each padded array (M, ...)."""
        stage, n = jax.lax.axis_index(self.axes), -(-len(batches.rows) // self.groups.n_stages)
        return jax.tree.map(
            lambda x: jax.lax.dynamic_slice_in_dim(self._pad(x), stage * n, n), batches
        )

    def _gather(self, own: jax.Array, M: int) -> jax.Array:
        """Return the values (M, B) of all microbatches, given this stage's share."""
        start = jax.lax.axis_index(self.axes) * len(own)
        every = jnp.zeros_like(own, shape=(len(own) * self.groups.n_stages, *own.shape[1:]))
        every = jax.lax.dynamic_update_slice_in_dim(every, own, start, 0)
        return jax.lax.psum(every, self.axes)[:M]

    def _exchange(self, stored: jax.Array, dim: int | None) -> jax.Array:
        """Return the layers that this stage runs, in order, given the array that it stores.

        If `groups.is_contiguous` is False, the stages exchange layers once per step.

        Args:
            stored: L / S consecutive layers, a slice of each layer, or all layers.
            dim: negative index of the dim that is split over the stages, or None if `stored` has
                all layers.
        """
        if self.groups.is_contiguous:
            return stored
        if dim == -stored.ndim:
            sizes = enumerate(stored.shape[1:], start=1)
            dim = next((i for i, size in sizes if size % self.groups.n_stages == 0), None)
            if dim is None:
                stored = all_gather(stored, self.axes, 0)
            else:  # exchange consecutive layers for a slice of each layer
                stored = jax.lax.all_to_all(stored, self.axes, dim, 0, tiled=True)
        if dim is None:  # each stage has all layers
            own = jnp.array(self.groups.layers)[jax.lax.axis_index(self.axes)]
            return stored[own]
        every = stored[self.groups.layers.ravel()]
        return jax.lax.all_to_all(every, self.axes, 0, dim % stored.ndim, tiled=True)


def is_sharded(x: Any) -> bool:
    return isinstance(x, ShardedParam)
