"""What a run does with its parameters between steps, on a mesh: losses of batches, and decoding."""

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
from jaxgpt.models.transformer import gpt_graph
from jaxgpt.parallel.sharding import TENSOR, Params, batch_sharding, replicated
from jaxgpt.parallel.tensor import ParallelContext
from jaxgpt.parallel.zero import ShardedParam, local_params
from jaxgpt.train.step import (
    ShardedModel,
    gather_row_losses,
    local_loss,
    merge_microbatches,
    split_microbatches,
)

# (cache, tokens_1T, position of the first of them) -> (logits_1V, cache), see `decode_step`.
DecodeFn = Callable[[Cache, jax.Array, Any], tuple[jax.Array, Cache]]

SMALL_BYTES = 2**28  # of parameters: up to this size, all devices gather them to write samples


def eval_losses(model: ShardedModel, params: Params, rows: jax.Array) -> jax.Array:
    """Return mean losses of the rows (B,), without dropout, of token ids (B, T+1)."""

    def local(params: Params, rows: jax.Array) -> jax.Array:
        params, zeros = local_params(params, model.layouts)

        def row_sums(rows: jax.Array) -> jax.Array:
            return local_loss(model, zeros, params, rows)[1][0]

        n = model.n_slices
        if n == 1 or rows.shape[0] % n:  # rows that do not divide stay in one piece
            sums_B = row_sums(rows)
        else:
            sums_B = merge_microbatches(jax.lax.map(row_sums, split_microbatches(rows, n)))
        return gather_row_losses(model, sums_B, rows)

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
    unstacked = is_large and on_cpu and mesh.size == 1
    is_shared = is_large and mesh.size > 1
    tensor = model.context.tensor if is_shared else 1
    cache = empty_cache(model.config.model, dtype, not unstacked, tensor)
    if is_shared:
        context = ParallelContext(tensor=tensor, on_cpu=on_cpu)
        graph = make_graph(parallel=context, scan_layers=True)
        return functools.partial(_sharded_decode, model, graph, params), cache
    graph = make_graph(scan_layers=not unstacked)
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
            logits_1V = jax.lax.all_gather(logits_1V, TENSOR, axis=1, tiled=True)
        return logits_1V[:, : padded_vocab_size(model.config.model.vocab_size)], cache

    everywhere, own_heads = PartitionSpec(), PartitionSpec(None, TENSOR)
    own_cache = Cache(own_heads, own_heads, everywhere)
    return jax.shard_map(
        local,
        mesh=model.mesh,
        in_specs=(model.param_specs, own_cache, everywhere, everywhere),
        out_specs=(everywhere, own_cache),
        check_vma=False,  # gathered logits are the same everywhere, which is not tracked
    )(params, *operands)
