"""Losses, scores of tokens and decoding with the parameters of a run, on its mesh."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from jaxgpt.models.attention import Attention
from jaxgpt.models.decode import Cache, decode_step, empty_cache, unstack_layers
from jaxgpt.models.layers import padded_vocab_size
from jaxgpt.models.loss import TokenScores, score_tokens
from jaxgpt.models.transformer import gpt_graph
from jaxgpt.parallel.collectives import gather_rows
from jaxgpt.parallel.offload import to_device
from jaxgpt.parallel.sharding import Params, batch_sharding, replicated
from jaxgpt.parallel.tensor import ParallelContext
from jaxgpt.parallel.zero import ShardedParam, local_params
from jaxgpt.train.step import (
    ShardedModel,
    hidden_states,
    local_loss,
    merge_microbatches,
    split_microbatches,
)

# (cache, tokens_1T, position of the first of them) -> (logits_1V, cache), see `decode_step`.
DecodeFn = Callable[[Cache, jax.Array, Any], tuple[jax.Array, Cache]]

SMALL_BYTES = 2**28  # of parameters: up to this size, all devices gather them to write samples


def eval_losses(model: ShardedModel, params: Params, rows: jax.Array) -> jax.Array:
    """Return mean losses of the rows (B,), without dropout, of token ids (B, T+1)."""

    def row_sums(zeros: Params, params: Params, rows: jax.Array) -> jax.Array:
        return local_loss(model, zeros, params, rows)[1]["loss"]

    return _map_rows(model, row_sums, params, rows) / (rows.shape[1] - 1)


def eval_tokens(model: ShardedModel, params: Params, rows: jax.Array) -> TokenScores:
    """Return the scores of each token but the first of rows (B, T+1), without dropout.

    Rows may be filled up with `NO_TOKEN`, and be shorter than model.block_size.
    """
    config = model.config

    def scores(zeros: Params, params: Params, rows: jax.Array) -> TokenScores:
        x_BTD, w_VD, vocab_offset = hidden_states(model, zeros, params, rows[:, :-1])
        return score_tokens(
            x_BTD,
            w_VD,
            rows[:, 1:],
            vocab_offset,
            config.model,
            model.context,
            config.train.loss_chunk,
        )

    return _map_rows(model, scores, params, rows)


def _map_rows(
    model: ShardedModel, compute: Callable[..., Any], params: Params, rows: jax.Array
) -> Any:
    """Return `compute(zeros, params, rows)` of all rows, in arrays (B, ...), on every device."""

    def local(params: Params, rows: jax.Array) -> Any:
        params, zeros = local_params(params, model.layouts)
        compute_rows = functools.partial(compute, zeros, params)
        n = model.n_slices
        if n == 1 or rows.shape[0] % n:  # rows that do not divide stay in one piece
            found = compute_rows(rows)
        else:
            parts = jax.lax.map(compute_rows, split_microbatches(rows, n))
            found = jax.tree.map(merge_microbatches, parts)
        return jax.tree.map(lambda own: gather_rows(own, model.mesh), found)

    return jax.shard_map(
        local,
        mesh=model.mesh,
        in_specs=(model.param_specs, batch_sharding(model.mesh).spec),
        out_specs=PartitionSpec(),
    )(params, rows)


def make_decoder(model: ShardedModel, attend: Attention, params: Params) -> tuple[DecodeFn, Cache]:
    """Return the decode function of these parameters, and an empty cache.

    Decoding one token is too little work to share: every device gathers weights that are small,
    and decodes alone. A CPU decodes a large model fastest with each layer's weights apart.
    """
    mesh, on_cpu = model.mesh, model.context.on_cpu
    dtype = jnp.dtype(model.config.train.dtype)
    end_of_text = model.config.document_end
    make_graph = functools.partial(
        gpt_graph, model.config.model, dtype=dtype, attend=attend, end_of_text=end_of_text
    )
    is_large = sum(4 * p.size for p in jax.tree.leaves(params)) > SMALL_BYTES
    in_host = model.config.parallel.offload == "state"
    unstacked = is_large and on_cpu and mesh.size == 1 and not in_host
    is_shared = is_large and (mesh.size > 1 or in_host)
    tensor = model.context.tensor if is_shared else 1
    cache = empty_cache(model.config.model, dtype, not unstacked, tensor)
    if is_shared:
        axes = model.context.tensor_axes
        context = ParallelContext(tensor=tensor, tensor_axes=axes, on_cpu=on_cpu)
        graph = make_graph(parallel=context, scan_layers=True)
        return functools.partial(_sharded_decode, model, graph, params), cache
    graph = make_graph(scan_layers=not unstacked)
    params = jax.tree.map(to_device, params)
    params = jax.lax.with_sharding_constraint(params, replicated(mesh))
    if unstacked:
        params = unstack_layers(params)
    return lambda *operands: decode_step(nnx.merge(graph, params), *operands), cache


def _sharded_decode(
    model: ShardedModel, graph: nnx.GraphDef, params: Params, *operands: Any
) -> tuple[jax.Array, Cache]:
    """Compute `decode_step` where the parameters lie; each device has its own heads' cache."""

    def local(params: Params, *operands: Any) -> tuple[jax.Array, Cache]:
        sharded = jax.tree.map(ShardedParam, *local_params(params, model.layouts), model.layouts)
        logits_1V, cache = decode_step(nnx.merge(graph, sharded), *operands)
        if model.context.tensor > 1:
            axes = model.context.tensor_axes
            logits_1V = jax.lax.all_gather(logits_1V, axes, axis=1, tiled=True)
        return logits_1V[:, : padded_vocab_size(model.config.model.vocab_size)], cache

    everywhere, own_heads = PartitionSpec(), PartitionSpec(None, model.context.tensor_axes)
    own_cache = Cache(own_heads, own_heads, everywhere)
    return jax.shard_map(
        local,
        mesh=model.mesh,
        in_specs=(model.param_specs, own_cache, everywhere, everywhere),
        out_specs=(everywhere, own_cache),
        check_vma=False,  # gathered logits are the same everywhere, which is not tracked
    )(params, *operands)
