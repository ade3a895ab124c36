"""Evaluation losses, token scores and decoding with a run's parameters, on its mesh."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jaxgpt.data.batch import NO_TOKEN, Batch, TokenRows, make_batch
from jaxgpt.kernels.attention import Attention
from jaxgpt.models.decode import Cache, LayerCache, decode_step, empty_cache, unstack_layers
from jaxgpt.models.layers import layer_pattern, padded_vocab_size
from jaxgpt.models.loss import TokenScores
from jaxgpt.models.transformer import GPT, gpt_graph
from jaxgpt.parallel.collectives import gather_batch
from jaxgpt.parallel.offload import to_device
from jaxgpt.parallel.schedule import merge_microbatches, split_microbatches
from jaxgpt.parallel.sharding import Params, replicated
from jaxgpt.parallel.tensor import ParallelContext
from jaxgpt.parallel.zero import local_params
from jaxgpt.train.sharded_model import ShardedModel
from jaxgpt.train.step import weighted_mean

# (cache, tokens_1T, position of the first token[, index of the last token before the padding]) ->
# (logits_1V, updated cache); see `decode_step`.
DecodeFn = Callable[..., tuple[jax.Array, Cache]]

SMALL_BYTES = 2**28  # for decoding, parameters up to this total size are copied to every device


def eval_losses(
    model: ShardedModel, params: Params, token_rows: jax.Array | TokenRows
) -> jax.Array:
    """Compute the weighted mean loss of each row in nats, with dropout off.

    Returns a float32 array of shape (B,). The loss of a row is 0 if all its weights are 0.

    Args:
        token_rows: int32 (B, T+1) or `TokenRows`; see `make_batch`. B and T must satisfy the
            conditions of `eval_tokens`.
    """
    batch = make_batch(token_rows, end_of_text=model.config.document_end)

    def row_sums(network: GPT, batch: Batch) -> jax.Array:
        x_BTD, _ = model.schedule.run_all_blocks(network, batch, None)
        return network.head_loss(x_BTD, batch).rows["loss"]

    return weighted_mean(_map_rows(model, row_sums, params, batch), batch.weights.sum(axis=1))


def eval_tokens(model: ShardedModel, params: Params, tokens: jax.Array) -> TokenScores:
    """Score every token except the first of each row, with dropout off.

    Returns arrays of shape (B, T).

    Args:
        tokens: int32 (B, T+1). B must be divisible by the number of devices that the rows are split
            over. T may be smaller than model.block_size, but must meet the conditions that the mesh
            and the attention kernel impose on model.block_size. Short rows are padded with
            `NO_TOKEN`, whose loss is 0.
    """

    def scores(network: GPT, batch: Batch) -> TokenScores:
        x_BTD, _ = model.schedule.run_all_blocks(network, batch, None)
        return network.head_scores(x_BTD, batch)

    rows = TokenRows(tokens, tokens != NO_TOKEN)
    batch = make_batch(rows, end_of_text=model.config.document_end)
    return _map_rows(model, scores, params, batch)


def eval_logits(model: ShardedModel, params: Params, tokens: jax.Array) -> jax.Array:
    """Compute the next-token logits, with dropout off.

    Returns a float32 array of shape (B, T, V), where V excludes the padding of the vocabulary.

    Args:
        tokens: int32 (B, T+1), as for `eval_tokens`. The last token of each row is ignored.
    """

    def logits(network: GPT, batch: Batch) -> jax.Array:
        x_BTD, _ = model.schedule.run_all_blocks(network, batch, None)
        return network.head_logits(x_BTD)

    batch = make_batch(tokens, end_of_text=model.config.document_end)
    return _map_rows(model, logits, params, batch)[..., : model.config.model.vocab_size]


def _map_rows(
    model: ShardedModel, compute: Callable[[GPT, Batch], Any], params: Params, batch: Batch
) -> Any:
    """Return `compute(network, batch)` for all rows, as replicated arrays (B, ...)."""

    def local(params: Params, batch: Batch) -> Any:
        params, grad_accumulators = local_params(params, model.layouts)
        n = model.n_slices
        if n == 1 or batch.rows.shape[0] % n:  # not divisible: process all rows at once
            found = compute(model.network(grad_accumulators, params), batch)
        else:
            parts = split_microbatches(batch, n)
            found = jax.lax.map(
                lambda part: compute(model.network(grad_accumulators, params), part), parts
            )
            found = merge_microbatches(found)
        return jax.tree.map(lambda own: gather_batch(own, model.mesh), found)

    return model.run_on_shards(local, params, batch)


def make_decoder(model: ShardedModel, attend: Attention, params: Params) -> tuple[DecodeFn, Cache]:
    """Return the decode function for these parameters, and an empty KV cache.

    If the parameters take at most `SMALL_BYTES` in total, every device gets a copy and decodes all
    tokens, because distributing a small model would be slower. On several devices, larger models
    keep their sharding. With ZeRO-3, each call of the decode function all-gathers the parameters
    over `fsdp`. With pipeline parallelism, each stage gathers all layers once, before decoding.
    With parallel.offload=state, larger models stay in host memory. On a single CPU, a large model
    in device memory gets a separate array for each layer (`unstack_layers`), because that is
    faster.
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
        if model.layer_axes:
            model = model.with_whole_layers()
            shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), model.param_specs)
            params = jax.lax.with_sharding_constraint(params, shardings)
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
    """Compute `decode_step` with sharded parameters; each device caches only its own heads."""

    def local(params: Params, *operands: Any) -> tuple[jax.Array, Cache]:
        params, grad_accumulators = local_params(params, model.layouts)
        logits_1V, cache = decode_step(
            model._replace(graph=graph).network(grad_accumulators, params), *operands
        )
        if model.context.tensor > 1:
            axes = model.context.tensor_axes
            logits_1V = jax.lax.all_gather(logits_1V, axes, axis=1, tiled=True)
        return logits_1V[:, : padded_vocab_size(model.config.model.vocab_size)], cache

    everywhere, own_heads = PartitionSpec(), PartitionSpec(None, model.context.tensor_axes)
    layer = LayerCache(own_heads, own_heads, everywhere)
    own_cache = Cache((layer,) * len(layer_pattern(model.config.model)), everywhere)
    return jax.shard_map(
        local,
        mesh=model.mesh,
        in_specs=(model.param_specs, own_cache, *[everywhere] * (len(operands) - 1)),
        out_specs=(everywhere, own_cache),
        check_vma=False,  # JAX cannot infer that the gathered logits are replicated
    )(params, *operands)
