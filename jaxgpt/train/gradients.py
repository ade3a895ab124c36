"""Losses and gradients on a mesh: what each device computes, joined by `jax.shard_map`."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from jaxgpt.config import Config
from jaxgpt.models.kv_cache import Caches
from jaxgpt.models.layers import padded_vocab_size
from jaxgpt.models.loss import LogitMetrics, cross_entropy_sum
from jaxgpt.parallel import sharding
from jaxgpt.parallel.mesh import mesh_axes_with
from jaxgpt.parallel.sharding import FSDP, TENSOR, Params
from jaxgpt.parallel.tensor import ShardMapContext
from jaxgpt.parallel.zero import (
    ParamLayout,
    ShardedParam,
    mark_varying_params,
    reduce_gradients,
    varying,
    zero_gradients,
)


@dataclasses.dataclass(frozen=True)
class ShardedModel:
    """The network on a mesh. Public methods take and return whole arrays, laid out by the specs."""

    config: Config
    """With model.vocab_size set."""
    mesh: Mesh
    param_specs: Any
    """`PartitionSpec` of every parameter between steps."""
    grad_specs: Any
    """`PartitionSpec` of every gradient that the optimizer gets, and of its state."""
    layouts: Any
    """`ParamLayout` of every parameter: where it and its gradient lie during a step."""
    context: ShardMapContext
    graph: nnx.GraphDef
    """The network that trains."""
    decode_graph: nnx.GraphDef
    """The network that writes text, without sequence parallelism."""
    n_slices: int
    """Into how many slices each device cuts its rows of a microbatch."""
    logit_metrics: LogitMetrics

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """Mesh axes along which devices have different rows."""
        return mesh_axes_with("splits_batch", self.mesh)

    def loss_and_gradients(
        self, params: Params, step: jax.Array, rows: jax.Array
    ) -> tuple[jax.Array, Params, dict[str, jax.Array]]:
        """Return mean losses of the rows (B,), the gradient of their mean, and the logit metrics.

        Args:
            rows: token ids (B, T+1).
        """
        batch = sharding.batch_sharding(self.mesh).spec
        return jax.shard_map(
            self._local_loss_and_grads,
            mesh=self.mesh,
            in_specs=(self.param_specs, PartitionSpec(), batch, PartitionSpec(batch[0])),
            out_specs=(PartitionSpec(), self.grad_specs, PartitionSpec()),
        )(params, step, rows, jnp.arange(rows.shape[0]))

    def eval_losses(self, params: Params, rows: jax.Array) -> jax.Array:
        """Return mean losses of the rows (B,), without dropout, of token ids (B, T+1)."""
        return jax.shard_map(
            self._local_eval_losses,
            mesh=self.mesh,
            in_specs=(self.param_specs, sharding.batch_sharding(self.mesh).spec),
            out_specs=PartitionSpec(),
        )(params, rows)

    def decode(
        self, params: Params, caches: Caches, tokens_1T: jax.Array, position_offset: Any
    ) -> tuple[jax.Array, Caches]:
        """Return logits_1V and the caches, as `GPT.decode_step`; devices have their heads' own."""
        everywhere, own_heads = PartitionSpec(), PartitionSpec(None, TENSOR)
        return jax.shard_map(
            self._local_decode,
            mesh=self.mesh,
            in_specs=(self.param_specs, own_heads, everywhere, everywhere),
            out_specs=(everywhere, own_heads),
            check_vma=False,  # gathered logits are the same everywhere, which is not tracked
        )(params, caches, tokens_1T, position_offset)

    # What one device computes from its part of everything.

    def _local_params(self, params: Params) -> tuple[Params, Params]:
        zeros = zero_gradients(params, self.layouts, self.mesh.shape[FSDP])
        return mark_varying_params(params, self.layouts), zeros

    def _local_loss(
        self, zeros: Params, params: Params, rows: jax.Array, keys_B: jax.Array | None = None
    ) -> tuple[jax.Array, tuple[jax.Array, dict[str, jax.Array]]]:
        """Return the summed loss, and (sums of the rows (B,), logit metrics)."""
        model = self.config.model
        sharded = jax.tree.map(ShardedParam, params, zeros, self.layouts)
        x_BTD, w_VD, vocab_offset = nnx.merge(self.graph, sharded).hidden_states(
            rows[:, :-1], keys_B
        )
        return cross_entropy_sum(
            x_BTD,
            w_VD,
            rows[:, 1:],
            vocab_offset,
            model.vocab_size,
            self.context,
            self.config.train.loss_chunk,
            self.logit_metrics,
        )

    def _local_loss_and_grads(self, params, step, rows, row_numbers):
        """Take `row_numbers`, which count the rows of the whole batch: dropout depends on them."""
        params, zeros = self._local_params(params)
        train = self.config.train
        key = jax.random.fold_in(jax.random.key(train.seed), step)
        keys_B = jax.vmap(lambda row: jax.random.fold_in(key, row))(row_numbers)
        n_parts = train.gradient_accumulation_steps * self.n_slices
        (sums_B, metrics), gradients = accumulate_gradients(
            jax.value_and_grad(self._local_loss, has_aux=True),
            zeros, params, rows, keys_B, n_parts, self.logit_metrics,
        )  # fmt: skip
        n_tokens = rows[:, 1:].size * math.prod(self.mesh.shape[axis] for axis in self.batch_axes)
        gradients = jax.tree.map(lambda g: g / n_tokens, gradients)
        if self.config.faults.nan_step is not None:
            gradients = self._inject_nan(gradients, step)
        gradients = reduce_gradients(gradients, self.layouts)
        metrics = {
            name: metric.reduce_over_devices(metrics[name], self.mesh)
            for name, metric in self.logit_metrics.items()
        }
        return self._gather_row_losses(sums_B, rows), gradients, metrics

    def _local_eval_losses(self, params, rows):
        params, zeros = self._local_params(params)

        def row_sums(rows: jax.Array) -> jax.Array:
            return self._local_loss(zeros, params, rows)[1][0]

        n = self.n_slices
        if n == 1 or rows.shape[0] % n:  # rows that do not divide stay in one piece
            return self._gather_row_losses(row_sums(rows), rows)
        sums_B = merge_microbatches(jax.lax.map(row_sums, split_microbatches(rows, n)))
        return self._gather_row_losses(sums_B, rows)

    def _local_decode(self, params, caches, tokens_1T, position_offset):
        sharded = jax.tree.map(ShardedParam, *self._local_params(params), self.layouts)
        logits_1V, caches = nnx.merge(self.decode_graph, sharded).decode_step(
            caches, tokens_1T, position_offset
        )
        if self.context.tensor > 1:
            logits_1V = jax.lax.all_gather(logits_1V, TENSOR, axis=1, tiled=True)
        return logits_1V[:, : padded_vocab_size(self.config.model.vocab_size)], caches

    def _gather_row_losses(self, sums_B: jax.Array, rows: jax.Array) -> jax.Array:
        """Return the mean losses of all rows from the sums over this device's."""
        axes = self.batch_axes
        if axes:  # a sum with zeros, which is exact
            n = sums_B.size
            n_all = n * math.prod(self.mesh.shape[axis] for axis in axes)
            all_B = varying(jnp.zeros(n_all), frozenset(axes))
            offset = jax.lax.axis_index(axes) * n
            sums_B = jax.lax.dynamic_update_slice(all_B, sums_B, (offset,))
        return jax.lax.psum(sums_B, axes) / (rows.shape[1] - 1)

    def _inject_nan(self, gradients: Params, step: jax.Array) -> Params:
        """Make the gradient of device faults.nan_device NaN at step faults.nan_step.

        Gradients that devices along `tensor` are known to share stay as they are.
        """
        faults, mesh = self.config.faults, self.mesh
        axes = tuple(axis for axis in mesh.axis_names if mesh.shape[axis] > 1)
        device = jax.lax.axis_index(axes) if axes else 0
        hit = (step == faults.nan_step) & (device == faults.nan_device)

        def inject(gradient: jax.Array, layout: ParamLayout) -> jax.Array:
            own = layout.partial_axes | layout.mesh_axes >= set(axes)
            return jnp.where(hit, jnp.nan, gradient) if own else gradient

        return jax.tree.map(inject, gradients, self.layouts)


def accumulate_gradients(
    value_and_grad: Callable[..., Any],
    zeros: Any,
    params: Any,
    rows: jax.Array,
    keys_B: jax.Array,
    n_parts: int,
    logit_metrics: LogitMetrics,
) -> tuple[tuple[jax.Array, dict[str, jax.Array]], Any]:
    """Return ((losses of all rows, logit metrics), the summed gradient of `n_parts` microbatches).

    Microbatches are computed one after the other; number i holds the rows i, i + n_parts, ... of
    each device, hence of the global batch.

    Args:
        value_and_grad: (zeros, params, rows, keys) -> ((sum, (losses of the rows, logit metrics)),
            gradient of the sum, like zeros).
        n_parts: microbatches, or slices of them.
    """
    if n_parts == 1:
        (_, aux), gradients = value_and_grad(zeros, params, rows, keys_B)
        return aux, gradients

    def add(total, microbatch):
        # The barrier keeps XLA from gathering all weights of ZeRO-3 once, before the loop.
        here = jax.tree.map(
            lambda param: jax.lax.optimization_barrier((param, microbatch[0]))[0], params
        )
        (_, aux), gradients = value_and_grad(zeros, here, *microbatch)
        return jax.tree.map(jnp.add, total, gradients), aux

    parts = split_microbatches(rows, n_parts), split_microbatches(keys_B, n_parts)
    gradients, (losses, metrics) = jax.lax.scan(add, zeros, parts)
    metrics = {name: m.reduce(metrics[name]) for name, m in logit_metrics.items()}
    return (merge_microbatches(losses), metrics), gradients


def split_microbatches(x: jax.Array, n_parts: int) -> jax.Array:
    """Split (B, ...) into (n_parts, B / n_parts, ...): part i holds rows i, i + n_parts, ..."""
    return x.reshape(x.shape[0] // n_parts, n_parts, *x.shape[1:]).swapaxes(0, 1)


def merge_microbatches(losses: jax.Array) -> jax.Array:
    """Merge (n_parts, B / n_parts) to (B,), in the order before `split_microbatches`."""
    return losses.swapaxes(0, 1).reshape(-1)
