"""A GPT-2-like transformer in flax.nnx: the network as equations, without a word about devices.

Shapes: B batch, T sequence, D embed, H heads, K head dim, F mlp, V vocab, L layers. The weights of
the L blocks are stacked along a leading `layers` axis, one array per kind of weight.
"""

import operator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental.layout import Layout, with_layout_constraint

from jaxgpt.config import ModelConfig
from jaxgpt.models.attention import Attention, xla_attention
from jaxgpt.models.kv_cache import Cache, Caches
from jaxgpt.models.layers import (
    LayerBuilder,
    keys_for,
    make_mlp,
    padded_vocab_size,
    position_embedding,
    token_embedding,
)
from jaxgpt.parallel.remat import rematerialized
from jaxgpt.parallel.tensor import NO_PARALLELISM, ParallelContext


class SelfAttention(nnx.Module):
    """Causal attention of H heads, each of size K = D / H."""

    def __init__(self, attend: Attention, build: LayerBuilder):
        D, H = build.config.n_embd, build.config.n_head
        K = D // H
        self.attend, self.parallel = attend, build.parallel
        self.qkv = build.column_parallel((D,), (3, H, K), ("embed", None, "heads", None))
        self.out = build.row_parallel((H, K), (D,), ("heads", None, "embed"))

    def __call__(
        self,
        x_BTD: jax.Array,
        keys_B: jax.Array | None,
        cache: Cache | None,
        layer: Any,
        position_offset: Any,
    ) -> tuple[jax.Array, Cache | None]:
        """Return y_BTD, and the cache with these positions; arguments as for `Block`."""
        qkv_BTCHK = self.qkv(x_BTD)
        # Not by indexing, whose gradient is a sum of arrays that are zero elsewhere.
        q_BTHK, k_BTHK, v_BTHK = (x.squeeze(2) for x in jnp.split(qkv_BTCHK, 3, axis=2))
        n_heads = q_BTHK.shape[2]  # of this device
        heads_H = self.parallel.tensor_offset(n_heads) + jnp.arange(n_heads)
        keys_BH = keys_for(keys_B, heads_H)
        k_BSHK, v_BSHK = k_BTHK, v_BTHK
        if cache is not None:
            cache = cache.update(layer, k_BTHK, v_BTHK, position_offset)
            k_BSHK, v_BSHK = (x_HKS.transpose(2, 0, 1)[None] for x_HKS in cache.layer(layer))
        if k_BSHK.shape == q_BTHK.shape:  # all positions at once, as in training
            mixed_BTHK = self.attend(q_BTHK, k_BSHK, v_BSHK, keys_BH)
        else:
            mixed_BTHK = xla_attention(q_BTHK, k_BSHK, v_BSHK, position_offset=position_offset)
        return self.out(mixed_BTHK), cache


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, attend: Attention, build: LayerBuilder):
        self.dropout = build.dropout
        self.norm_1, self.norm_2 = build.norm(), build.norm()
        self.attention = SelfAttention(attend, build)
        self.mlp = make_mlp(build)

    def __call__(
        self,
        x_BTD: jax.Array,
        keys_B: jax.Array | None = None,
        cache: Cache | None = None,
        layer: Any = None,
        position_offset: Any = 0,
    ) -> tuple[jax.Array, Cache | None]:
        """Compute one layer.

        Args:
            keys_B: a key for every row; without, there is no dropout.
            cache: of the positions before x_BTD; without, x_BTD are all.
            layer: the number of this one in the cache; None where the cache is its own.
            position_offset: the position at which x_BTD begins.

        Returns:
            x_BTD for the next layer, and the cache with these positions.
        """
        keys = (None,) * 3 if keys_B is None else keys_for(keys_B, jnp.arange(3)).T
        normed_BTD = self.norm_1(x_BTD)
        y_BTD, cache = self.attention(normed_BTD, keys[0], cache, layer, position_offset)
        x_BTD = x_BTD + self.dropout(y_BTD, keys[1])
        y_BTD = self.mlp(self.norm_2(x_BTD))
        return x_BTD + self.dropout(y_BTD, keys[2]), cache


class GPT(nnx.Module):
    """tokens_BT -> logits_BTV. The embedding of tokens is also the output layer."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: jnp.dtype = jnp.float32,
        attend: Attention = xla_attention,
        parallel: ParallelContext = NO_PARALLELISM,
        scan_layers: bool = False,
        remat: str = "none",
        rngs: nnx.Rngs,
    ):
        """Initialize float32 parameters.

        Args:
            config: with `vocab_size` set.
            dtype: of the computation, to which logits are rounded; they come as float32.
            attend: what `attention.make_attention` gives.
            parallel: how this device and the others share the work.
            scan_layers: compile one block and loop over it, in place of L blocks.
            remat: what of a layer the backward pass computes again, see `remat`.
        """
        assert config.vocab_size is not None
        self.config, self.dtype = config, dtype
        self.parallel, self.scan_layers, self.remat = parallel, scan_layers, remat
        self.token_embedding = token_embedding(config, rngs)
        self.position_embedding = position_embedding(config, rngs)

        @nnx.vmap
        def make_block(key):
            return Block(attend, LayerBuilder(config, dtype, parallel, nnx.Rngs(params=key)))

        self.layers = make_block(jax.random.split(rngs.params(), config.n_layer))
        build = LayerBuilder(config, dtype, parallel, rngs)
        self.norm, self.dropout = build.norm(), build.dropout

    def __call__(self, tokens_BT: jax.Array, keys_B: jax.Array | None = None) -> jax.Array:
        """Return logits (float32, padded vocabulary, padding at -inf); dropout only with keys.

        Of a vocabulary that is split over devices, this device's shard.
        """
        x_BTD, w_VD, vocab_offset = self.hidden_states(tokens_BT, keys_B)
        return logits(x_BTD, w_VD, vocab_offset, self.config.vocab_size)

    def decode_step(
        self, caches: Caches, tokens_1T: jax.Array, position_offset: Any
    ) -> tuple[jax.Array, Caches]:
        """Return logits_1V of the token after these, and the caches with these; no dropout.

        Args:
            caches: of the positions before `position_offset`.
            tokens_1T: of the positions from there on, which must be below block_size.
        """
        x_1TD, w_VD, vocab_offset, caches = self._hidden(tokens_1T, None, caches, position_offset)
        return logits(x_1TD[:, -1], w_VD, vocab_offset, self.config.vocab_size), caches

    def hidden_states(
        self, tokens_BT: jax.Array, keys_B: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array, Any]:
        """Return what the output layer multiplies, x_BTD and this device's w_VD, and its offset."""
        return self._hidden(tokens_BT, keys_B)[:3]

    def _hidden(
        self,
        tokens_BT: jax.Array,
        keys_B: jax.Array | None,
        caches: Caches | None = None,
        position_offset: Any = 0,
    ) -> tuple[jax.Array, jax.Array, Any, Caches | None]:
        parallel, L = self.parallel, self.config.n_layer
        if self.config.dropout == 0:
            keys_B = None
        keys = None if keys_B is None else keys_for(keys_B, jnp.arange(L + 1)).T
        layer_keys, own_keys = (None, None) if keys is None else (keys[:L], keys[L])
        w_VD = gather_params(self.token_embedding, parallel).embedding[...].astype(self.dtype)
        V = padded_vocab_size(self.config.vocab_size)
        w_VD, vocab_offset = parallel.local_vocab_shard(w_VD, V)
        w_TD = gather_params(self.position_embedding, parallel).embedding[...]
        T = parallel.local_sequence_length(tokens_BT.shape[1])
        start = position_offset + parallel.sequence_offset(T)
        w_TD = jax.lax.dynamic_slice_in_dim(w_TD, start, T)
        x_BTD = parallel.reduce_from_tensor_region(embed_tokens(w_VD, tokens_BT - vocab_offset))
        x_BTD = (x_BTD + w_TD).astype(self.dtype)  # float32, as a layer's bias
        if caches is None and not parallel.on_cpu:
            # Or XLA lays B last, as the gradient of w_TD sums over it, and on GPUs every layer
            # transposes to and fro: 15 % of what they move in a step of GPT-2.
            x_BTD = with_layout_constraint(x_BTD, Layout(major_to_minor=(0, 1, 2)))
        x_BTD = self.dropout(x_BTD, own_keys)
        x_BTD, caches = self._layers(x_BTD, layer_keys, caches, position_offset)
        x_BTD = parallel.copy_to_tensor_region(gather_params(self.norm, parallel)(x_BTD))
        return x_BTD, w_VD, vocab_offset, caches

    def _layers(
        self, x_BTD: jax.Array, keys_LB: jax.Array | None, caches: Caches | None, offset: Any
    ) -> tuple[jax.Array, Caches | None]:
        L = self.config.n_layer
        graph, stacked = nnx.split(self.layers)

        def layer(carry, given):
            x_BTD, cache = carry
            params, keys_B, number = given
            block = gather_params(nnx.merge(graph, params), self.parallel)
            return block(x_BTD, keys_B, cache, number, offset), None

        layer = rematerialized(layer, self.remat, in_loop=self.scan_layers)
        if self.scan_layers:
            numbers_L = None if caches is None else jnp.arange(L)
            return jax.lax.scan(layer, (x_BTD, caches), (stacked, keys_LB, numbers_L))[0]
        written = []
        for i in range(L):
            own = jax.tree.map(operator.itemgetter(i), (stacked, keys_LB))
            cache = None if caches is None else caches[i]
            (x_BTD, cache), _ = layer((x_BTD, cache), (*own, None))
            written.append(cache)
        return x_BTD, None if caches is None else tuple(written)


def gather_params(module: nnx.Module, parallel: ParallelContext) -> Any:
    """Return the module with its parameters ready for use, but for matrices of `Linear` layers."""
    graph, params = nnx.split(module)

    def ready(_: tuple[Any, ...], param: nnx.Param) -> nnx.Param:
        if param.get_metadata()["role"] == "matrix":
            return param
        return param.replace(parallel.param(param.get_value()))

    return nnx.merge(graph, nnx.map_state(ready, params))


def embed_tokens(w_VD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
    """Return rows of w_VD; zeros for tokens that are not among them, but on another device."""
    is_here_BT = (tokens_BT >= 0) & (tokens_BT < w_VD.shape[0])
    # In float32, since the gradient of a row is the sum over all places where its token stands.
    rows_BTD = w_VD.astype(jnp.float32)[jnp.where(is_here_BT, tokens_BT, 0)]
    return jnp.where(is_here_BT[..., None], rows_BTD, 0).astype(w_VD.dtype)


def logits(x_BTD: jax.Array, w_VD: jax.Array, vocab_offset: Any, vocab_size: int) -> jax.Array:
    """Return scores of the tokens from `vocab_offset` on; -inf for those that only pad.

    They are rounded to the operands' dtype, as nanoGPT's and llm.c's: of GPT-2's step on GPUs, to
    write and read them in float32 would take another 7 %.
    """
    logits_BTV = jnp.einsum("...D,VD->...V", x_BTD, w_VD).astype(jnp.float32)
    is_token_V = vocab_offset + jnp.arange(w_VD.shape[0]) < vocab_size
    return jnp.where(is_token_V, logits_BTV, -jnp.inf)
