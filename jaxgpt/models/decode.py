"""Autoregressive decoding of one row with a KV cache: nothing here is part of a training step."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.config import ModelConfig
from jaxgpt.data.batch import input_batch
from jaxgpt.models.attention import TokenPositions, xla_attention
from jaxgpt.models.layers import layer_pattern
from jaxgpt.models.transformer import GPT, Block
from jaxgpt.parallel.sharding import Params

PREFILL_CHUNK = 128  # tokens of a prompt that are decoded at once


class LayerCache(NamedTuple):
    """Keys and values of the last S positions, in the layers at one place of `layer_pattern`.

    Position n of the text is in slot n mod S: with rotary positions, a text may be longer than S.
    The dims are in the order in which attention's products need them, because another order would
    be copied for every token. Layers that are not scanned have a tuple of arrays (G, K, S) instead
    of one with a leading axis, or each would be copied out of the whole.
    """

    k_LGKS: jax.Array | tuple[jax.Array, ...]
    v_LGKS: jax.Array | tuple[jax.Array, ...]
    starts_S: jax.Array  # position at which the document of each token begins: int32 (S,)


class Cache(NamedTuple):
    """What decoding keeps of a text."""

    layers: tuple[LayerCache, ...]  # by place in `layer_pattern`
    # For each of the last block_size positions, in the same order of slots: the position at which
    # the document of the token after it begins.
    next_starts_S: jax.Array


def empty_cache(config: ModelConfig, dtype: jnp.dtype, scan_layers: bool, tensor: int = 1) -> Cache:
    """Return the cache of an empty text.

    Args:
        tensor: number of devices that share the heads. If it does not divide the key-value heads,
            there is one for each query head.
    """
    G = config.kv_heads if config.kv_heads % tensor == 0 else config.n_head
    pattern, layers = layer_pattern(config), []
    for place, kind in enumerate(pattern):
        L = len(range(place, config.n_layer, len(pattern)))
        S = config.block_size
        if kind.window is not None:  # the first query of a chunk attends to the window before it
            S = min(S, kind.window + PREFILL_CHUNK)
        zeros_GKS = jnp.zeros((G, config.head_size, S), dtype)
        zeros_LGKS = jnp.stack([zeros_GKS] * L) if scan_layers else (zeros_GKS,) * L
        layers.append(LayerCache(zeros_LGKS, zeros_LGKS, jnp.zeros(S, jnp.int32)))
    return Cache(tuple(layers), jnp.zeros(config.block_size, jnp.int32))


class CachedAttention:
    """Attention of one layer over the cached positions and new ones, which it adds to `cache`."""

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
        """Return out_1THK."""
        layer, T, S = self.layer, q_1THK.shape[1], self.cache.starts_S.size
        position = q_at.positions[0]

        def write(x_LGKS: Any, new_1TGK: jax.Array) -> Any:
            new_GKT = new_1TGK[0].transpose(1, 2, 0)
            if isinstance(x_LGKS, tuple):
                own_GKS = write_slots(x_LGKS[layer], new_GKT, position)
                return (*x_LGKS[:layer], own_GKS, *x_LGKS[layer + 1 :])
            return write_slots(x_LGKS, new_GKT[None], position, layer)

        k_LGKS, v_LGKS = write(self.cache.k_LGKS, k_1TGK), write(self.cache.v_LGKS, v_1TGK)
        self.cache = self.cache._replace(k_LGKS=k_LGKS, v_LGKS=v_LGKS)
        if T == self.network.config.block_size:  # all positions at once, as in training
            return self.network.attend(q_1THK, k_1TGK, v_1TGK, q_at, k_at, window, keys_BH)
        k_1SGK, v_1SGK = (x[layer].transpose(2, 0, 1)[None] for x in (k_LGKS, v_LGKS))
        starts_1S = None if q_at.segments is None else self.cache.starts_S[None]
        cached_at = TokenPositions(slot_positions(S, position + T), starts_1S)
        return xla_attention(q_1THK, k_1SGK, v_1SGK, q_at, cached_at, window)


def write_slots(x_S: jax.Array, new_T: jax.Array, position: Any, layer: Any = None) -> jax.Array:
    """Return an array whose last axis is that of slots, with new values from a position on.

    Args:
        x_S: (..., S), or (L, ..., S) with a `layer`.
        new_T: (..., T), or (1, ..., T) with a `layer`; of more than S values the last S stay.
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


def slot_positions(S: int, n_read: Any) -> jax.Array:
    """Return the position that each slot holds after `n_read` tokens.

    If a slot holds none yet, it is a position that no query sees.
    """
    newest = n_read - 1
    positions_S = newest - (newest - jnp.arange(S)) % S
    return jnp.where(positions_S < 0, np.iinfo(np.int32).max, positions_S)


def decode_step(
    network: GPT, cache: Cache, tokens_1T: jax.Array, position: Any
) -> tuple[jax.Array, Cache]:
    """Return logits_1V of the token after these, and the cache with these; no dropout.

    Args:
        cache: of the tokens before.
        tokens_1T: tokens from `position` on; several tokens must be before block_size.
        position: of the first token in the text. With learned positions, all must be below
            block_size.
    """
    positions_T = jnp.asarray(position, jnp.int32) + jnp.arange(tokens_1T.shape[1])
    at, batch = TokenPositions(positions_T), input_batch(tokens_1T)
    batch = batch._replace(positions=positions_T[None])
    if network.end_of_text is not None:
        cache, starts_T = read_documents(cache, tokens_1T[0] == network.end_of_text, positions_T)
        # A document is known by its start.
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
    logits_1V = network.output_layer.logits(network.last_norm(x_1TD)[:, -1])
    return logits_1V, cache._replace(layers=layers)


def read_documents(
    cache: Cache, is_end_T: jax.Array, positions_T: jax.Array
) -> tuple[Cache, jax.Array]:
    """Return the cache with the documents of new tokens, and where these documents begin.

    Args:
        is_end_T: whether a new token ends its document.
        positions_T: of the new tokens in the text.
    """
    position, S = positions_T[0], cache.next_starts_S.size
    first = jnp.where(position == 0, 0, cache.next_starts_S[(position - 1) % S])
    begins = jnp.concatenate([first[None], jnp.where(is_end_T, positions_T + 1, 0)])
    starts = jax.lax.cummax(begins)  # of the new tokens and the one after them
    starts_T, next_starts_T = starts[:-1], starts[1:]
    layers = [
        one._replace(starts_S=write_slots(one.starts_S, starts_T, position)) for one in cache.layers
    ]
    return Cache(tuple(layers), write_slots(cache.next_starts_S, next_starts_T, position)), starts_T


class PerLayer(tuple):
    """An array for each layer, in place of one with a leading axis L.

    JAX does not look into subclasses of tuple: to `jax.tree.map` it is a leaf, as the one array is.
    """


def unstack_layers(params: Params) -> Params:
    """Return the parameters with arrays for each layer, for layers that are not scanned.

    Where they are read again and again, in a loop, XLA would otherwise copy each layer's out of
    the whole every time. They take as much memory once more.
    """
    return params | {"layers": jax.tree.map(PerLayer, params["layers"])}
