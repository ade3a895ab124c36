"""A transformer in flax.nnx: the network as equations; `ParallelContext` has what devices share.

Shapes: B batch, T sequence, D embed, H heads, G key-value heads, K head dim, F mlp, V vocab,
L layers. The weights of the L blocks are stacked along a leading `layers` axis, one array per kind
of weight.
"""

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental.layout import Layout, with_layout_constraint

from jaxgpt.config import ModelConfig
from jaxgpt.models.attention import Attention, document_starts, make_attention
from jaxgpt.models.layers import (
    LayerBuilder,
    Positions,
    SelfAttention,
    embedding,
    keys_for,
    padded_vocab_size,
)
from jaxgpt.models.mlp import make_mlp
from jaxgpt.models.rope import Rotation, make_rotation
from jaxgpt.parallel.remat import rematerialized
from jaxgpt.parallel.tensor import NO_PARALLELISM, ParallelContext


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, build: LayerBuilder):
        self.dropout = build.dropout
        self.norm_1, self.norm_2 = build.norm(), build.norm()
        self.attention, self.mlp = SelfAttention(build), make_mlp(build)

    def __call__(
        self, x_BTD: jax.Array, keys_B: jax.Array | None, attend: Attention, positions: Positions
    ) -> jax.Array:
        """Return x_BTD for the next layer; without a key for every row, there is no dropout."""
        keys = (None,) * 3 if keys_B is None else keys_for(keys_B, jnp.arange(3)).T
        out_BTD = self.attention(self.norm_1(x_BTD), keys[0], attend, positions)
        x_BTD = x_BTD + self.dropout(out_BTD, keys[1])
        return x_BTD + self.dropout(self.mlp(self.norm_2(x_BTD)), keys[2])


class GPT(nnx.Module):
    """tokens_BT -> logits_BTV."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: jnp.dtype = jnp.float32,
        attend: Attention | None = None,
        parallel: ParallelContext = NO_PARALLELISM,
        scan_layers: bool = False,
        remat: str = "none",
        end_of_text: int | None = None,
        stacked: Callable[..., Any] = nnx.vmap,
        rngs: nnx.Rngs,
    ):
        """Initialize float32 parameters.

        Args:
            config: with `vocab_size` set.
            dtype: of the computation, to which logits are rounded; they come as float32.
            attend: made by `attention.make_attention`; None is XLA's.
            parallel: how this device and the others share the work.
            scan_layers, remat: as in parallel.scan_layers and parallel.remat.
            end_of_text: the token that ends a document, to keep attention inside of documents.
            stacked: key -> block to the same for many keys.
        """
        assert config.vocab_size is not None
        self.config, self.dtype = config, dtype
        self.attend = attend or make_attention("xla", config)
        self.parallel, self.scan_layers, self.remat = parallel, scan_layers, remat
        self.end_of_text = end_of_text
        V, T = config.vocab_size, config.block_size
        self.token_embedding = embedding(V, config, rngs, "token_embedding", "vocab")
        self.position_embedding = self.head = nnx.data(None)
        if config.position == "learned":
            table = embedding(T, config, rngs, "position_embedding", None)
            self.position_embedding = nnx.data(table)

        def make_block(key):
            return Block(LayerBuilder(config, dtype, parallel, nnx.Rngs(params=key)))

        self.layers = stacked(make_block)(jax.random.split(rngs.params(), config.n_layer))
        build = LayerBuilder(config, dtype, parallel, rngs)
        self.norm, self.dropout = build.norm(), build.dropout
        if not config.tie_embeddings:
            self.head = nnx.data(embedding(V, config, rngs, "output_embedding", "vocab"))

    def __call__(self, tokens_BT: jax.Array, keys_B: jax.Array | None = None) -> jax.Array:
        """Return logits (float32, padded vocabulary, padding at -inf); dropout only with keys.

        Of a vocabulary that is split over devices, this device's shard.
        """
        x_BTD, w_VD, vocab_offset = self.hidden_states(tokens_BT, keys_B)
        return logits(x_BTD, w_VD, vocab_offset, self.config)

    def hidden_states(
        self, tokens_BT: jax.Array, keys_B: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array, Any]:
        """Return the operands of the output layer, x_BTD and this device's w_VD, and its offset."""
        L = self.config.n_layer
        layer_keys, own_keys = None, None
        if keys_B is not None and self.config.dropout > 0:
            keys = keys_for(keys_B, jnp.arange(L + 1)).T
            layer_keys, own_keys = keys[:L], keys[L]
        starts_BT = None
        if self.end_of_text is not None:
            starts_BT = document_starts(tokens_BT, self.end_of_text)
        x_BTD, w_VD, vocab_offset = self.embed(tokens_BT, starts_BT=starts_BT)
        positions = Positions(self.rotation(tokens_BT.shape[1]), starts_BT)
        if not self.parallel.on_cpu:
            # Or XLA lays B last, as the gradient of positions sums over it, and on GPUs every layer
            # transposes to and fro: 15 % of what they move in a step of GPT-2.
            x_BTD = with_layout_constraint(x_BTD, Layout(major_to_minor=(0, 1, 2)))
        x_BTD = self.dropout(x_BTD, own_keys)
        x_BTD = self.run_layers(
            lambda block, x_BTD, keys_B: block(x_BTD, keys_B, self.attend, positions),
            x_BTD,
            layer_keys,
        )
        return self.last_norm(x_BTD), w_VD, vocab_offset

    def embed(
        self,
        tokens_BT: jax.Array,
        position_offset: Any = 0,
        starts_BT: jax.Array | int | None = None,
    ) -> tuple[jax.Array, jax.Array, Any]:
        """Return x_BTD for the first layer, w_VD of the output layer and its offset.

        Args:
            position_offset: position of the first token in its row.
            starts_BT: where each token's document begins, from which learned positions count.
        """
        w_VD, vocab_offset = self.vocab_shard(self.token_embedding)
        x_BTD = embed_tokens(w_VD, tokens_BT - vocab_offset)
        x_BTD = self.parallel.reduce_from_tensor_region(x_BTD)
        if self.position_embedding is not None:
            w_TD = gather_params(self.position_embedding, self.parallel).embedding[...]
            T = self.parallel.local_sequence_length(tokens_BT.shape[1])
            start = position_offset + self.parallel.sequence_offset(T)
            if starts_BT is None:
                w_TD = jax.lax.dynamic_slice_in_dim(w_TD, start, T)
            else:
                own_BT = jax.lax.dynamic_slice_in_dim(starts_BT, start - position_offset, T, axis=1)
                w_TD = w_TD[start + jnp.arange(T) - own_BT]
            x_BTD = x_BTD + w_TD
        if self.head is not None:
            w_VD, vocab_offset = self.vocab_shard(self.head)
        return x_BTD.astype(self.dtype), w_VD, vocab_offset  # float32, as a layer's bias

    def vocab_shard(self, table: nnx.Embed) -> tuple[jax.Array, Any]:
        """Return this device's rows of a table of the vocabulary, and the number of the first."""
        w_VD = gather_params(table, self.parallel).embedding[...].astype(self.dtype)
        V = padded_vocab_size(self.config.vocab_size)
        return self.parallel.local_vocab_shard(w_VD, V)

    def rotation(self, T: int, position_offset: Any = 0) -> Rotation | None:
        """Return the rotation of queries and keys; None without model.position=rope."""
        if self.config.position != "rope":
            return None
        return make_rotation(self.config, position_offset + jnp.arange(T))

    def run_layers(self, run: Callable[..., Any], carry: Any, of_layers: Any) -> Any:
        """Return the carry after `run(block, carry, x)` for each layer and its x in `of_layers`."""
        graph, stacked = nnx.split(self.layers)

        def layer(carry: Any, own: tuple[Any, Any]) -> tuple[Any, None]:
            params, x = own
            block = gather_params(nnx.merge(graph, params), self.parallel)
            return run(block, carry, x), None

        layer = rematerialized(layer, self.remat, in_loop=self.scan_layers)
        if self.scan_layers:
            return jax.lax.scan(layer, carry, (stacked, of_layers))[0]
        for i in range(self.config.n_layer):
            carry, _ = layer(carry, jax.tree.map(operator.itemgetter(i), (stacked, of_layers)))
        return carry

    def last_norm(self, x_BTD: jax.Array) -> jax.Array:
        """Return what the output layer multiplies, given the last layer's output."""
        return self.parallel.copy_to_tensor_region(gather_params(self.norm, self.parallel)(x_BTD))


def gpt_graph(config: ModelConfig, **options: Any) -> nnx.GraphDef:
    """Return the network without parameters, to be merged with some; options as for `GPT`."""
    return nnx.graphdef(nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0), **options)))


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


def logits(x_BTD: jax.Array, w_VD: jax.Array, vocab_offset: Any, config: ModelConfig) -> jax.Array:
    """Return scores of the tokens from `vocab_offset` on; -inf for those that only pad.

    They are rounded to the operands' dtype, as nanoGPT's and llm.c's: of GPT-2's step on GPUs, to
    write and read them in float32 would take another 7 %.
    """
    logits_BTV = jnp.einsum("...D,VD->...V", x_BTD, w_VD).astype(jnp.float32)
    if (cap := config.logit_softcap) is not None:
        logits_BTV = cap * jnp.tanh(logits_BTV / cap)
    is_token_V = vocab_offset + jnp.arange(w_VD.shape[0]) < config.vocab_size
    return jnp.where(is_token_V, logits_BTV, -jnp.inf)
