"""What a model remembers of a text that it reads token by token: attention's keys and values."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxgpt.config import ModelConfig
from jaxgpt.parallel.sharding import Params


class Cache(NamedTuple):
    """Keys and values at the positions of a row that were read; S is block_size.

    Of one layer, or with a leading axis L. In the order in which attention's products take them:
    another would be copied for every token.
    """

    k_HKS: jax.Array
    v_HKS: jax.Array

    def update(self, layer: Any, k_1THK: jax.Array, v_1THK: jax.Array, offset: Any) -> "Cache":
        """Return it with what a layer adds from a position on; layer None is the only one."""
        assert k_1THK.shape[0] == 1

        def write(x: jax.Array, new_1THK: jax.Array) -> jax.Array:
            new_HKT, place = new_1THK[0].transpose(1, 2, 0), (0, 0, offset)
            if layer is None:
                return jax.lax.dynamic_update_slice(x, new_HKT, place)
            return jax.lax.dynamic_update_slice(x, new_HKT[None], (layer, *place))

        return Cache(write(self.k_HKS, k_1THK), write(self.v_HKS, v_1THK))

    def layer(self, layer: Any) -> "Cache":
        """Return that of one layer; None is the only one."""
        return self if layer is None else Cache(self.k_HKS[layer], self.v_HKS[layer])


# Of all layers: one with a leading axis L where layers are scanned, else one for each.
Caches = Cache | tuple[Cache, ...]


class PerLayer(tuple):
    """An array for each layer, in place of one with a leading axis L.

    JAX does not look into subclasses of tuple: to `jax.tree.map` it is a leaf, as the one array is.
    """


def empty_caches(config: ModelConfig, dtype: jnp.dtype, scan_layers: bool) -> Caches:
    """Return room for what `GPT.decode_step` reads of one row."""
    L, S, H = config.n_layer, config.block_size, config.n_head
    zeros_HKS = jnp.zeros((H, config.n_embd // H, S), dtype)
    cache = Cache(zeros_HKS, zeros_HKS)
    if scan_layers:
        return jax.tree.map(lambda zeros: jnp.stack([zeros] * L), cache)
    return (cache,) * L


def unstack_layers(params: Params) -> Params:
    """Return the parameters with arrays for each layer, for layers that are not scanned.

    Where they are read again and again, in a loop, XLA would otherwise copy each layer's out of
    the whole every time. They take as much memory once more.
    """
    return params | {"layers": jax.tree.map(PerLayer, params["layers"])}
