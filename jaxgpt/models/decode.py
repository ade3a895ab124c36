"""Autoregressive decoding of one row with a KV cache: nothing here is part of a training step."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.config import ModelConfig
from jaxgpt.models.attention import xla_attention
from jaxgpt.models.layers import Positions
from jaxgpt.models.transformer import GPT, logits
from jaxgpt.parallel.sharding import Params


class Cache(NamedTuple):
    """Keys and values of all layers, of the last S positions of a row; S is block_size.

    Position n lies in slot n mod S: a text with rotary positions may be longer than S. In the order
    in which attention's products take them: another would be copied for every token. For layers
    that are not scanned a tuple of arrays GKS, or each would be copied out of the whole.
    """

    k_LGKS: jax.Array | tuple[jax.Array, ...]
    v_LGKS: jax.Array | tuple[jax.Array, ...]
    is_end_S: jax.Array  # whether the token there ends a document


def empty_cache(config: ModelConfig, dtype: jnp.dtype, scan_layers: bool, tensor: int = 1) -> Cache:
    """Return the cache of a row of which nothing was read, for so many devices along `tensor`.

    Where these do not divide the key-value heads, there is one for each query head.
    """
    L, S = config.n_layer, config.block_size
    G = config.kv_heads if config.kv_heads % tensor == 0 else config.n_head
    zeros_GKS = jnp.zeros((G, config.head_size, S), dtype)
    zeros_LGKS = jnp.stack([zeros_GKS] * L) if scan_layers else (zeros_GKS,) * L
    return Cache(zeros_LGKS, zeros_LGKS, jnp.zeros(S, bool))


class CachedAttention:
    """Attention of one layer over the cached positions and new ones, which it adds to `cache`."""

    def __init__(self, cache: Cache, layer: Any, position_offset: Any, network: GPT):
        self.cache, self.layer, self.position_offset = cache, layer, position_offset
        self.attend, self.window = network.attend, network.config.sliding_window

    def __call__(
        self,
        q_1THK: jax.Array,
        k_1TGK: jax.Array,
        v_1TGK: jax.Array,
        keys_BH: None,
        starts_1T: jax.Array | None,
    ) -> jax.Array:
        """Return out_1THK."""
        layer, T, S = self.layer, q_1THK.shape[1], self.cache.is_end_S.size
        start = (0, 0, self.position_offset % S)

        def write(x_LGKS: Any, new_1TGK: jax.Array) -> Any:
            new_GKT = new_1TGK[0].transpose(1, 2, 0)
            if isinstance(x_LGKS, tuple):
                own_GKS = jax.lax.dynamic_update_slice(x_LGKS[layer], new_GKT, start)
                return (*x_LGKS[:layer], own_GKS, *x_LGKS[layer + 1 :])
            return jax.lax.dynamic_update_slice(x_LGKS, new_GKT[None], (layer, *start))

        k_LGKS, v_LGKS = map(write, self.cache[:2], (k_1TGK, v_1TGK))
        self.cache = Cache(k_LGKS, v_LGKS, self.cache.is_end_S)
        k_1SGK, v_1SGK = (x[layer].transpose(2, 0, 1)[None] for x in (k_LGKS, v_LGKS))
        if T == S:  # all positions at once, as in training
            return self.attend(q_1THK, k_1SGK, v_1SGK, keys_BH, starts_1T)
        return xla_attention(
            q_1THK,
            k_1SGK,
            v_1SGK,
            keys_BH,
            starts_1T,
            window=self.window,
            position_offset=self.position_offset,
            key_positions_S=slot_positions(S, self.position_offset + T),
        )


def slot_positions(S: int, n_read: Any) -> jax.Array:
    """Return the position that each slot holds after `n_read` tokens.

    Of a slot that holds none yet it is one that no query sees: S or more.
    """
    newest = n_read - 1
    positions_S = newest - (newest - jnp.arange(S)) % S
    return jnp.where(positions_S < 0, positions_S + 2 * S, positions_S)


def decode_step(
    network: GPT, cache: Cache, tokens_1T: jax.Array, position_offset: Any
) -> tuple[jax.Array, Cache]:
    """Return logits_1V of the token after these, and the cache with these; no dropout.

    Args:
        cache: of the positions before `position_offset`.
        tokens_1T: of the positions from there on. With learned positions these must be below
            block_size; with rotary ones, several tokens must be, one alone may be anywhere.
    """
    cache, starts_1T = read_documents(network, cache, tokens_1T, position_offset)
    x_1TD, w_VD, vocab_offset = network.embed(tokens_1T, position_offset, starts_1T)
    positions = Positions(network.rotation(tokens_1T.shape[1], position_offset), starts_1T)

    def run(block: Any, carry: tuple[jax.Array, Cache], layer: Any) -> tuple[jax.Array, Cache]:
        x_1TD, cache = carry
        attend = CachedAttention(cache, layer, position_offset, network)
        return block(x_1TD, None, attend, positions), attend.cache

    layers_L = np.arange(network.config.n_layer, dtype=np.int32)
    x_1TD, cache = network.run_layers(run, (x_1TD, cache), layers_L)
    x_1TD = network.last_norm(x_1TD)
    return logits(x_1TD[:, -1], w_VD, vocab_offset, network.config), cache


def read_documents(
    network: GPT, cache: Cache, tokens_1T: jax.Array, position_offset: Any
) -> tuple[Cache, jax.Array | None]:
    """Return the cache with where documents end, and where each token's document begins.

    None without data.document_mask. What ends before the cached positions is not known, and needs
    not be: nothing there is attended to.
    """
    if network.end_of_text is None:
        return cache, None
    T, S = tokens_1T.shape[1], cache.is_end_S.size
    start = (position_offset % S,)
    is_end_S = jax.lax.dynamic_update_slice(
        cache.is_end_S, tokens_1T[0] == network.end_of_text, start
    )
    positions_S = slot_positions(S, position_offset + T)
    is_before_TS = positions_S < (position_offset + jnp.arange(T))[:, None]
    begins_TS = jnp.where(is_end_S & is_before_TS, positions_S + 1, 0)
    return cache._replace(is_end_S=is_end_S), begins_TS.max(axis=1)[None]


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
