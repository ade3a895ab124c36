"""Autoregressive decoding of one row with a KV cache: nothing here is part of a training step."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.config import ModelConfig
from jaxgpt.models.attention import Attention, xla_attention
from jaxgpt.models.transformer import GPT, logits
from jaxgpt.parallel.sharding import Params


class Cache(NamedTuple):
    """Keys and values of all layers, at the positions of a row that were read; S is block_size.

    In the order in which attention's products take them: another would be copied for every token.
    For layers that are not scanned a tuple of arrays HKS, or each would be copied out of the whole.
    """

    k_LHKS: jax.Array | tuple[jax.Array, ...]
    v_LHKS: jax.Array | tuple[jax.Array, ...]


def empty_cache(config: ModelConfig, dtype: jnp.dtype, scan_layers: bool) -> Cache:
    """Return the cache of a row of which nothing was read."""
    L, S, H = config.n_layer, config.block_size, config.n_head
    zeros_HKS = jnp.zeros((H, config.n_embd // H, S), dtype)
    zeros_LHKS = jnp.stack([zeros_HKS] * L) if scan_layers else (zeros_HKS,) * L
    return Cache(zeros_LHKS, zeros_LHKS)


class CachedAttention:
    """Attention of one layer over the cached positions and new ones, which it adds to `cache`."""

    def __init__(self, cache: Cache, layer: Any, position_offset: Any, attend: Attention):
        self.cache, self.layer, self.position_offset = cache, layer, position_offset
        self.attend = attend

    def __call__(
        self, q_1THK: jax.Array, k_1THK: jax.Array, v_1THK: jax.Array, keys_BH: None
    ) -> jax.Array:
        """Return out_1THK."""

        layer, start = self.layer, (0, 0, self.position_offset)

        def write(x_LHKS: Any, new_1THK: jax.Array) -> Any:
            new_HKT = new_1THK[0].transpose(1, 2, 0)
            if isinstance(x_LHKS, tuple):
                own_HKS = jax.lax.dynamic_update_slice(x_LHKS[layer], new_HKT, start)
                return (*x_LHKS[:layer], own_HKS, *x_LHKS[layer + 1 :])
            return jax.lax.dynamic_update_slice(x_LHKS, new_HKT[None], (layer, *start))

        self.cache = Cache(*map(write, self.cache, (k_1THK, v_1THK)))
        k_1SHK, v_1SHK = (x[layer].transpose(2, 0, 1)[None] for x in self.cache)
        if k_1SHK.shape == q_1THK.shape:  # all positions at once, as in training
            return self.attend(q_1THK, k_1SHK, v_1SHK, keys_BH)
        return xla_attention(q_1THK, k_1SHK, v_1SHK, position_offset=self.position_offset)


def decode_step(
    network: GPT, cache: Cache, tokens_1T: jax.Array, position_offset: Any
) -> tuple[jax.Array, Cache]:
    """Return logits_1V of the token after these, and the cache with these; no dropout.

    Args:
        cache: of the positions before `position_offset`.
        tokens_1T: of the positions from there on, which must be below block_size.
    """
    x_1TD, w_VD, vocab_offset = network.embed(tokens_1T, position_offset)

    def run(block: Any, carry: tuple[jax.Array, Cache], layer: Any) -> tuple[jax.Array, Cache]:
        x_1TD, cache = carry
        attend = CachedAttention(cache, layer, position_offset, network.attend)
        return block(x_1TD, None, attend), attend.cache

    layers_L = np.arange(network.config.n_layer, dtype=np.int32)
    x_1TD, cache = network.run_layers(run, (x_1TD, cache), layers_L)
    x_1TD = network.last_norm(x_1TD)
    return logits(x_1TD[:, -1], w_VD, vocab_offset, network.config.vocab_size), cache


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
