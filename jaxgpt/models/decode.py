"""Autoregressive decoding of one row with a KV cache. Training steps do not use this file."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.config import ModelConfig
from jaxgpt.data.batch import input_batch
from jaxgpt.kernels.attention import TokenPositions, xla_attention
from jaxgpt.models.layers import layer_pattern
from jaxgpt.models.transformer import GPT, Block
from jaxgpt.parallel.sharding import Params

PREFILL_CHUNK = 128  # number of prompt tokens to process at a time


class LayerCache(NamedTuple):
    """Keys and values of the last S positions, for the layers of one entry in `layer_pattern`.

    S is block_size or the window plus `PREFILL_CHUNK`, whichever is smaller. Position n is stored
    in slot n mod S, so a sequence may be longer than S. Attention's matmuls need this order of
    dims. Any other order would require a copy for every token. If the network's `scan_layers` is
    False, the cache consists of tuples of arrays (G, K, S), because XLA would copy each layer out
    of a stacked array.
    """

    k_LGKS: jax.Array | tuple[jax.Array, ...]
    v_LGKS: jax.Array | tuple[jax.Array, ...]
    starts_S: jax.Array  # position at which the document of each slot's token begins: int32 (S,)


class Cache(NamedTuple):
    """The KV cache of one sequence."""

    layers: tuple[LayerCache, ...]  # one for each entry of `layer_pattern`
    # Position at which the next token's document begins, for each of the last block_size tokens:
    # int32 (block_size,), with slots as in `LayerCache`.
    next_starts_S: jax.Array


def empty_cache(config: ModelConfig, dtype: jnp.dtype, scan_layers: bool, tensor: int = 1) -> Cache:
    """Return the cache of an empty sequence, with the heads of all devices.

    Args:
        dtype: dtype of the keys and values.
        scan_layers: the network's `scan_layers`; see `LayerCache`.
        tensor: number of devices that the heads are split over. If the number of key-value heads is
            not divisible by `tensor`, the cache stores one key-value head per query head.
    """
    G = config.kv_heads if config.kv_heads % tensor == 0 else config.n_head
    pattern, layers = layer_pattern(config), []
    for place, kind in enumerate(pattern):
        L = len(range(place, config.n_layer, len(pattern)))
        S = config.block_size
        if kind.window is not None:  # the first query of a chunk sees the window before it
            S = min(S, kind.window + PREFILL_CHUNK)
        zeros_GKS = jnp.zeros((G, config.head_size, S), dtype)
        zeros_LGKS = jnp.stack([zeros_GKS] * L) if scan_layers else (zeros_GKS,) * L
        layers.append(LayerCache(zeros_LGKS, zeros_LGKS, jnp.zeros(S, jnp.int32)))
    return Cache(tuple(layers), jnp.zeros(config.block_size, jnp.int32))


class CachedAttention:
    """Attention in one layer, over cached and new tokens.

    Each call adds the keys and values of the new tokens to the attribute `cache`. `layer` is the
    layer's index in the cache.
    """

    def __init__(self, cache: LayerCache, layer: Any, network: GPT):
        self.cache, self.layer, self.network = cache, layer, network

    def __call__(
        self,
        q_1THK: jax.Array,
        k_1TGK: jax.Array,
        v_1TGK: jax.Array,
        q_at: TokenPositions,
        k_at: TokenPositions,
        window: int | None,
        keys_BH: None,
    ) -> jax.Array:
        """Return out_1THK for T new tokens; see `kernels.attention.Attention`.

        If T is block_size, the new tokens attend only to one another, not to cached tokens. See
        `decode_step` for the limits of T.
        """
        layer, T, S = self.layer, q_1THK.shape[1], self.cache.starts_S.size
        position = q_at.positions[0]

        def write(x_LGKS: Any, new_1TGK: jax.Array) -> Any:
            new_GKT = new_1TGK[0].transpose(1, 2, 0)
            if isinstance(x_LGKS, tuple):
                own_GKS = _write_slots(x_LGKS[layer], new_GKT, position)
                return (*x_LGKS[:layer], own_GKS, *x_LGKS[layer + 1 :])
            return _write_slots(x_LGKS, new_GKT[None], position, layer)

        k_LGKS, v_LGKS = write(self.cache.k_LGKS, k_1TGK), write(self.cache.v_LGKS, v_1TGK)
        self.cache = self.cache._replace(k_LGKS=k_LGKS, v_LGKS=v_LGKS)
        if T == self.network.config.block_size:  # a full block, as in training
            return self.network.attend(q_1THK, k_1TGK, v_1TGK, q_at, k_at, window, keys_BH)
        k_1SGK, v_1SGK = (x[layer].transpose(2, 0, 1)[None] for x in (k_LGKS, v_LGKS))
        starts_1S = None if q_at.segments is None else self.cache.starts_S[None]
        cached_at = TokenPositions(_slot_positions(S, position + T), starts_1S)
        return xla_attention(q_1THK, k_1SGK, v_1SGK, q_at, cached_at, window)


def _write_slots(x_S: jax.Array, new_T: jax.Array, position: Any, layer: Any = None) -> jax.Array:
    """Write new values to their slots along the last axis of `x_S`.

    Args:
        x_S: array (..., S); if `layer` is not None, (L, ..., S).
        new_T: array (..., T); if `layer` is not None, (1, ..., T). If T > S, only the last S values
            are written.
        position: position of the first new value.
        layer: index of the layer to write. None means that `x_S` is not stacked over layers.

    Returns:
        The updated array, with the shape of `x_S`.
    """
    S = x_S.shape[-1]
    if (surplus := new_T.shape[-1] - S) > 0:
        new_T, position = new_T[..., surplus:], position + surplus
    T = new_T.shape[-1]
    if T == 1:
        first = 0 if layer is None else layer
        start = (first, *[0] * (x_S.ndim - 2), position % S) if x_S.ndim > 1 else (position % S,)
        return jax.lax.dynamic_update_slice(x_S, new_T, start)
    slots = (position + jnp.arange(T)) % S
    if layer is None:
        return x_S.at[..., slots].set(new_T, unique_indices=True)
    own_S = jax.lax.dynamic_index_in_dim(x_S, layer, keepdims=True)
    own_S = own_S.at[..., slots].set(new_T, unique_indices=True)
    return jax.lax.dynamic_update_slice_in_dim(x_S, own_S, layer, 0)


def _slot_positions(S: int, n_read: Any) -> jax.Array:
    """Return the position stored in each slot after `n_read` tokens: int32 (S,).

    Empty slots get the largest int32, a position that no query attends to.
    """
    newest = n_read - 1
    positions_S = newest - (newest - jnp.arange(S)) % S
    return jnp.where(positions_S < 0, np.iinfo(np.int32).max, positions_S)


def decode_step(
    network: GPT, cache: Cache, tokens_1T: jax.Array, position: Any, last: Any = -1
) -> tuple[jax.Array, Cache]:
    """Process T new tokens of one sequence, without dropout.

    Args:
        network: a network without rematerialization (remat `none`) and without sequence sharding.
        cache: cache with the preceding tokens.
        tokens_1T: int32 IDs of the new tokens. T is at most `PREFILL_CHUNK`, or block_size for a
            full block at position 0. If T > 1, all positions must be below block_size.
        position: position of the first new token. With learned positions, all positions must be
            below block_size.
        last: index of the last real token in `tokens_1T`. Later tokens are padding. After a full
            block with padding, some tokens may be missing from the cache.

    Returns:
        float32 logits_1V for the token that follows the one at index `last`, and the cache with the
        new tokens. V is the padded vocabulary size, or the size of this device's shard.
    """
    positions_T = jnp.asarray(position, jnp.int32) + jnp.arange(tokens_1T.shape[1])
    at, batch = TokenPositions(positions_T), input_batch(tokens_1T)
    batch = batch._replace(positions=positions_T[None])
    if network.end_of_text is not None:
        cache, starts_T = _read_documents(cache, tokens_1T[0] == network.end_of_text, positions_T)
        # Use the first position of a document as its number.
        at = TokenPositions(positions_T, starts_T[None])
        batch = batch._replace(positions=(positions_T - starts_T)[None])
    pattern = layer_pattern(network.config)
    inputs = [network.attention_inputs(kind, at) for kind in pattern]

    def run(block: Block, place: int, carry: Any, layer: Any) -> Any:
        x_1TD, layers = carry
        attend = CachedAttention(layers[place], layer // len(pattern), network)
        x_1TD, _ = block(x_1TD, None, inputs[place]._replace(attend=attend))
        return (x_1TD, (*layers[:place], attend.cache, *layers[place + 1 :])), None

    layers_L = np.arange(network.config.n_layer, dtype=np.int32)
    carry = network.embed(batch), cache.layers
    (x_1TD, layers), _ = network.scan_blocks(run, carry, layers_L)
    logits_1V = network.output_layer.logits(network.last_norm(x_1TD)[:, last])
    return logits_1V, cache._replace(layers=layers)


def _read_documents(
    cache: Cache, is_end_T: jax.Array, positions_T: jax.Array
) -> tuple[Cache, jax.Array]:
    """Find where the document of each new token begins, and store these positions in the cache.

    Args:
        is_end_T: bool (T,): whether each new token ends a document.
        positions_T: int32 (T,): positions of the new tokens in the sequence.

    Returns:
        The updated cache, and the position at which each new token's document begins: int32 (T,).
    """
    position, S = positions_T[0], cache.next_starts_S.size
    first = jnp.where(position == 0, 0, cache.next_starts_S[(position - 1) % S])
    begins = jnp.concatenate([first[None], jnp.where(is_end_T, positions_T + 1, 0)])
    starts = jax.lax.cummax(begins)  # for the new tokens and the token that follows them
    starts_T, next_starts_T = starts[:-1], starts[1:]
    layers = [
        one._replace(starts_S=_write_slots(one.starts_S, starts_T, position))
        for one in cache.layers
    ]
    return Cache(
        tuple(layers), _write_slots(cache.next_starts_S, next_starts_T, position)
    ), starts_T


class PerLayer(tuple):
    """One array for each layer, instead of one array with a leading axis L.

    `jax.tree.map` treats it as a single leaf, because JAX does not traverse subclasses of tuple
    other than named tuples.
    """


def unstack_layers(params: Params) -> Params:
    """Return the parameters with a separate array for each layer, for decoding without a scan.

    With stacked arrays, XLA would copy each layer's weights out of the stack in every iteration of
    a decoding loop. The separate arrays are copies. Until the stacked arrays are deleted, the
    layers take twice the memory.
    """
    return params | {"layers": jax.tree.map(PerLayer, params["layers"])}
