"""The model on a mesh: programs that each device runs on its part, joined by `jax.shard_map`."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from jaxgpt.config import Config
from jaxgpt.models.attention import Attention
from jaxgpt.models.kv_cache import Caches
from jaxgpt.models.loss import summed_loss
from jaxgpt.models.transformer import GPT, abstract_params, padded_vocab_size
from jaxgpt.parallel import sharding as partition
from jaxgpt.parallel.remat import without_scores
from jaxgpt.parallel.sharding import Params
from jaxgpt.parallel.tensor import (
    BATCH_AXES,
    ManyDevices,
    Weight,
    WeightLayout,
    own_parameters,
    reduce_gradients,
    varying,
    weight_layout,
    zero_gradients,
)


class Sharded(NamedTuple):
    """Functions of whole arrays that are computed in parts."""

    stored: Any
    """`PartitionSpec` of every parameter between steps."""
    updated: Any
    """`PartitionSpec` of every gradient that the optimizer gets, and of its moments."""
    loss_and_gradients: Callable[[Params, jax.Array, jax.Array], tuple[jax.Array, Params]]
    """(params, step, tokens of shape (B, T+1)) -> mean losses of the rows, shape (B,), and the
    gradient of their mean."""
    losses: Callable[[Params, jax.Array], jax.Array]
    """(params, tokens of shape (B, T+1)) -> mean losses of the rows, (B,), without dropout."""
    read: Callable[[Params, Caches, jax.Array, Any], tuple[jax.Array, Caches]]
    """(params, caches, tokens_1T, first) -> (logits_1V, caches), as `GPT.read`: every device has
    the row, and in the caches its own heads."""


def make_sharded(
    config: Config, mesh: Mesh, attend: Attention, slices: int = 1, on_cpu: bool = False
) -> Sharded:
    """Builds the functions.

    Args:
        config: with model.vocab_size set.
        attend: the attention function.
        slices: into how many parts each device cuts its rows of a microbatch.
        on_cpu: whether the functions are written as CPUs compute them fastest.
    """
    model, train, parallel = config.model, config.train, config.parallel
    stage, parts = parallel.zero_stage, train.gradient_accumulation_steps * slices
    if parallel.remat == "attention":
        attend = without_scores(attend)

    # Where everything lives.
    shapes, axes = abstract_params(model)
    specs = functools.partial(partition.partition_specs, axes, shapes, mesh=mesh)
    stored = specs(partition.parameter_rules(stage))
    updated = specs(partition.moment_rules(stage))
    summed = specs(partition.gradient_rules(stage, config.reduces_once))
    batch = partition.batch_sharding(mesh).spec
    batch_axes = tuple(axis for axis in BATCH_AXES if mesh.shape[axis] > 1)
    devices = ManyDevices(
        tensor=mesh.shape["tensor"],
        sequence_parallel=parallel.sequence_parallel and mesh.shape["tensor"] > 1,
        dtype=jnp.dtype(train.dtype),
        on_cpu=on_cpu,
    )
    gathers = devices.sequence_parallel or (stage == 3 and mesh.shape["fsdp"] > 1)
    keeps_all = parallel.remat in ("none", "attention")  # the others do not keep what they gather
    devices = dataclasses.replace(devices, gather_again=gathers and keeps_all)
    layouts = jax.tree.map(
        functools.partial(
            weight_layout,
            tensor=devices.tensor,
            batch_axes=batch_axes,
            sequence_parallel=devices.sequence_parallel,
            reduce_dtype=parallel.grad_reduce_dtype,
        ),
        stored,
        summed,
        updated,
        axes,
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )

    def graph(devices: ManyDevices, scan_layers: bool) -> nnx.GraphDef:
        network = functools.partial(
            GPT,
            model,
            dtype=devices.dtype,
            attend=attend,
            devices=devices,
            scan_layers=scan_layers,
            remat=parallel.remat,
        )
        return nnx.graphdef(nnx.eval_shape(lambda: network(rngs=nnx.Rngs(0))))

    training_graph = graph(devices, config.scans_layers(on_cpu))
    sampling_graph = graph(dataclasses.replace(devices, sequence_parallel=False), True)

    # What each device computes.
    def prepared(params: Params) -> tuple[Params, Params]:
        zeros = zero_gradients(params, layouts, mesh.shape["fsdp"])
        return own_parameters(params, layouts), zeros

    def summed_loss_here(
        zeros: Params, params: Params, rows: jax.Array, keys_B: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        weights = jax.tree.map(Weight, params, zeros, layouts)
        x_BTD, w_VD, first = nnx.merge(training_graph, weights).hidden(rows[:, :-1], keys_B)
        return summed_loss(
            x_BTD, w_VD, rows[:, 1:], first, model.vocab_size, devices, train.loss_chunk
        )

    n_shares = math.prod(mesh.shape[axis] for axis in batch_axes)

    def everyones(sums_B: jax.Array, rows: jax.Array) -> jax.Array:
        """Mean losses of all rows, from the sums over this device's: adding zeros is exact."""
        if batch_axes:
            n = sums_B.size
            all_B = varying(jnp.zeros(n * n_shares), frozenset(batch_axes))
            place = jax.lax.axis_index(batch_axes) * n
            sums_B = jax.lax.dynamic_update_slice(all_B, sums_B, (place,))
        return jax.lax.psum(sums_B, batch_axes) / (rows.shape[1] - 1)

    def loss_and_gradients_here(params, step, rows, numbers):
        """`numbers` counts the rows of the whole batch: dropout depends on them."""
        params, zeros = prepared(params)
        key = jax.random.fold_in(jax.random.key(train.seed), step)
        keys_B = jax.vmap(lambda row: jax.random.fold_in(key, row))(numbers)
        sums_B, gradients = accumulated(
            jax.value_and_grad(summed_loss_here, has_aux=True), zeros, params, rows, keys_B, parts
        )
        n_tokens = rows[:, 1:].size * n_shares
        gradients = jax.tree.map(lambda g: g / n_tokens, gradients)
        if config.faults.nan_step is not None:
            gradients = faulty(gradients, step)
        return everyones(sums_B, rows), reduce_gradients(gradients, layouts)

    def faulty(gradients: Params, step: jax.Array) -> Params:
        """The rehearsal of faults.nan_step: what one device found is not a number.

        Left as they are: gradients that devices along `tensor` are known to share.
        """
        axes = tuple(axis for axis in mesh.axis_names if mesh.shape[axis] > 1)
        device = jax.lax.axis_index(axes) if axes else 0
        hit = (step == config.faults.nan_step) & (device == config.faults.nan_device)

        def hurt(gradient: jax.Array, layout: WeightLayout) -> jax.Array:
            own = layout.partial | layout.split >= set(axes)
            return jnp.where(hit, jnp.nan, gradient) if own else gradient

        return jax.tree.map(hurt, gradients, layouts)

    def losses_here(params, rows):
        params, zeros = prepared(params)

        def sums(rows: jax.Array) -> jax.Array:
            return summed_loss_here(zeros, params, rows)[1]

        if slices == 1 or rows.shape[0] % slices:  # rows that do not divide stay together
            return everyones(sums(rows), rows)
        return everyones(together(jax.lax.map(sums, in_parts(rows, slices))), rows)

    def read_here(params, caches, tokens_1T, first):
        weights = jax.tree.map(Weight, *prepared(params), layouts)
        logits_1V, caches = nnx.merge(sampling_graph, weights).read(caches, tokens_1T, first)
        if devices.tensor > 1:
            logits_1V = jax.lax.all_gather(logits_1V, "tensor", axis=1, tiled=True)
        return logits_1V[:, : padded_vocab_size(model.vocab_size)], caches

    everywhere, own_heads = PartitionSpec(), PartitionSpec(None, "tensor")
    on_mesh = functools.partial(jax.shard_map, mesh=mesh)
    loss_and_gradients = on_mesh(
        loss_and_gradients_here,
        in_specs=(stored, everywhere, batch, PartitionSpec(batch[0])),
        out_specs=(everywhere, updated),
    )
    return Sharded(
        stored=stored,
        updated=updated,
        loss_and_gradients=lambda params, step, rows: loss_and_gradients(
            params, step, rows, jnp.arange(rows.shape[0])
        ),
        losses=on_mesh(losses_here, in_specs=(stored, batch), out_specs=everywhere),
        read=on_mesh(
            read_here,
            in_specs=(stored, own_heads, everywhere, everywhere),
            out_specs=(everywhere, own_heads),
            check_vma=False,  # what was gathered is the same everywhere, which is not tracked
        ),
    )


def accumulated(
    value_and_grad: Callable[..., tuple[tuple[jax.Array, jax.Array], Any]],
    zeros: Any,
    params: Any,
    rows: jax.Array,
    keys_B: jax.Array,
    parts: int,
) -> tuple[jax.Array, Any]:
    """Losses of all rows and the summed gradient of `parts` microbatches, one after the other.

    Part i holds the rows i, i + parts, ... of each device, hence of the global batch.

    Args:
        parts: microbatches, or slices of them.
        value_and_grad: (zeros, params, rows, keys) -> ((sum, losses of the rows), gradient of the
            sum, like zeros).
    """
    if parts == 1:
        (_, losses_B), gradients = value_and_grad(zeros, params, rows, keys_B)
        return losses_B, gradients

    def add(total, microbatch):
        # The barrier keeps XLA from gathering all weights of ZeRO-3 once, before the loop.
        here = jax.tree.map(
            lambda param: jax.lax.optimization_barrier((param, microbatch[0]))[0], params
        )
        (_, losses), gradients = value_and_grad(zeros, here, *microbatch)
        return jax.tree.map(jnp.add, total, gradients), losses

    gradients, losses = jax.lax.scan(add, zeros, (in_parts(rows, parts), in_parts(keys_B, parts)))
    return together(losses), gradients


def in_parts(x: jax.Array, parts: int) -> jax.Array:
    """(B, ...) -> (parts, B / parts, ...): part i holds the rows i, i + parts, ..."""
    return x.reshape(x.shape[0] // parts, parts, *x.shape[1:]).swapaxes(0, 1)


def together(losses: jax.Array) -> jax.Array:
    """(parts, B / parts) -> (B,), in the order before `in_parts`."""
    return losses.swapaxes(0, 1).reshape(-1)
