"""A transformer in flax.nnx, written as equations. A `ParallelContext` handles communication.

Shapes: B batch, T sequence, D embed, H heads, G key-value heads, K head dim, F mlp, V vocab, L
layers. The weights of the L blocks are stacked along a leading `layers` axis.

Comments such as `B/b T/s D` give the sharding of an activation. `b` stands for the mesh axes that
split the batch. `t` stands for the mesh axes that split heads, F and V. `s` equals `t` with
sequence parallelism, and is empty without it. `+t` marks partial sums over `t`. With sequence
parallelism, `T/s -> T` is an all-gather, and `+t -> T/s` is a reduce-scatter. Otherwise, `T/s -> T`
does nothing, and `+t -> T/s` is an all-reduce. If the sequence is split over `context`, T is the
number of positions per device.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental.layout import Layout, with_layout_constraint

from jaxgpt.config import ModelConfig, UsageError
from jaxgpt.data.batch import Batch
from jaxgpt.kernels.attention import Attention, TokenPositions
from jaxgpt.models.attention import KERNELS, AttentionSetting
from jaxgpt.models.layers import (
    AttentionInputs,
    LayerBuilder,
    LayerKind,
    SelfAttention,
    embedding,
    keys_for,
    layer_pattern,
    padded_vocab_size,
)
from jaxgpt.models.loss import LossParts, OutputLayer, TokenScores, loss_parts, score_tokens
from jaxgpt.models.mlp import make_mlp
from jaxgpt.models.rope import make_rotation
from jaxgpt.parallel.context import gather_positions
from jaxgpt.parallel.remat import rematerialized
from jaxgpt.parallel.tensor import NO_PARALLELISM, ParallelContext


class Block(nnx.Module):
    """Transformer block: x + attention(norm(x)), then x + mlp(norm(x)).

    If model.post_norm is set, the outputs of attention and of the MLP are normalized before they
    are added to x.
    """

    def __init__(self, build: LayerBuilder):
        self.dropout = build.dropout
        self.norm_1, self.norm_2 = build.norm(), build.norm()
        self.post_norm_1 = self.post_norm_2 = nnx.data(None)
        if build.config.post_norm:
            self.post_norm_1, self.post_norm_2 = nnx.data(build.norm()), nnx.data(build.norm())
        self.attention, self.mlp = SelfAttention(build), make_mlp(build)

    def __call__(
        self, x_BTD: jax.Array, keys_B: jax.Array | None, inputs: AttentionInputs
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return x_BTD for the next block, and the MLP's auxiliary losses (B,) by name.

        Args:
            keys_B: a dropout key for each row; None disables dropout.
        """
        keys = (None,) * 3 if keys_B is None else keys_for(keys_B, jnp.arange(3)).T
        out_BTD = self.attention(self.norm_1(x_BTD), keys[0], inputs)  # B/b T/s D
        if self.post_norm_1 is not None:
            out_BTD = self.post_norm_1(out_BTD)
        x_BTD = x_BTD + self.dropout(out_BTD, keys[1])
        out_BTD, aux = self.mlp(self.norm_2(x_BTD))  # B/b T/s D
        if self.post_norm_2 is not None:
            out_BTD = self.post_norm_2(out_BTD)
        return x_BTD + self.dropout(out_BTD, keys[2]), aux


class GPT(nnx.Module):
    """The network, which consists of the pieces `embed`, `run_blocks` and `head_loss`."""

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
        loss_chunk: int = 0,
        keeps_tables: bool = False,
        stacked: Callable[..., Any] = nnx.vmap,
        rngs: nnx.Rngs,
    ):
        """Initialize the parameters in float32.

        Args:
            config: the model options, with `vocab_size` set.
            dtype: compute dtype. Logits are rounded to this dtype and returned as float32.
            attend: attention function, by default the `xla` kernel in `attention.KERNELS`.
            parallel: how the model is split over devices.
            scan_layers: loop over the blocks instead of unrolling them (parallel.scan_layers).
            remat: value of parallel.remat. `attention` has no effect unless `attend` implements it.
            end_of_text: ID of the token that ends a document. If set, attention stays within
                documents. If None, each row is one document, so all rows have the same positions.
            loss_chunk: value of train.loss_chunk, a number of tokens.
            keeps_tables: gather the token embedding once, and reuse it in a tied output layer. This
                is valid only if the network is created, used and dropped within one trace.
            stacked: function that turns a function (key -> block) into a function (L keys -> L
                stacked blocks), such as `nnx.vmap`.
            rngs: random keys for the initial parameters.

        Raises:
            UsageError: if `config.vocab_size` is None.
        """
        if config.vocab_size is None:
            raise UsageError(
                "model.vocab_size=None: the vocabulary size is unknown; set model.vocab_size=N, or "
                "build a jaxgpt.Trainer, which takes it from the data"
            )
        self.config, self.dtype = config, dtype
        self.attend = attend or KERNELS["xla"].make(AttentionSetting(config, str(dtype)))
        self.parallel, self.scan_layers, self.remat = parallel, scan_layers, remat
        self.end_of_text, self.loss_chunk = end_of_text, loss_chunk
        self.keeps_tables = keeps_tables
        self.measures_blocks = False  # if set, `run_blocks` returns sums of squares instead
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

    def __call__(self, batch: Batch, key: jax.Array | None = None) -> jax.Array:
        """Return logits_BTV in float32 over the padded vocabulary; logits of the padding are -inf.

        If the vocabulary is split over devices, V is this device's shard.

        Args:
            key: dropout key; None disables dropout.
        """
        x_BTD, _ = self.run_blocks(self.embed(batch, key), batch, key)
        return self.head_logits(x_BTD)

    def embed(self, batch: Batch, key: jax.Array | None = None) -> jax.Array:
        """Return the first block's input, x_BTD in the compute dtype.

        If model.scale_embeddings is set, token embeddings are multiplied by sqrt(D), which is
        rounded to the compute dtype. If model.position=learned, position embeddings are added, and
        positions must be below block_size. Without a document mask, learned positions must also be
        the same in all rows and, unless the sequence is split over `context`, consecutive. Dropout
        is applied last.

        Args:
            key: dropout key; None disables dropout.
        """
        w_VD, vocab_offset = self.token_table  # V/t D
        x_BTD = embed_tokens(w_VD, batch.tokens - vocab_offset)  # B/b T D +t
        x_BTD = self.parallel.reduce_from_tensor_region(x_BTD)  # +t -> T/s: B/b T/s D
        if self.config.scale_embeddings:
            x_BTD = x_BTD * jnp.asarray(self.config.n_embd**0.5, self.dtype)
        if self.position_embedding is not None:
            w_TD = gather_params(self.position_embedding, self.parallel).embedding[...]
            positions = self.parallel.local_positions(self.positions(batch).positions)
            if self.end_of_text is not None or self.parallel.sequence_axes:
                if self.end_of_text is not None:  # several tokens may have the same position
                    w_TD = self.parallel.keep_replicated(w_TD)
                x_BTD = x_BTD + w_TD[positions]
            else:
                x_BTD = x_BTD + jax.lax.dynamic_slice_in_dim(w_TD, positions[0], positions.size)
        x_BTD = x_BTD.astype(self.dtype)  # position embeddings were added in float32
        if not self.parallel.on_cpu:
            # Keep D minor. Because the gradient of the position embeddings sums over B, XLA would
            # make B the minor dimension. Every layer on a GPU would then transpose activations back
            # and forth, which would account for 15% of the bytes that a GPT-2 step moves.
            x_BTD = with_layout_constraint(x_BTD, Layout(major_to_minor=(0, 1, 2)))
        keys = self.dropout_keys(batch, key, jnp.array([self.config.n_layer]))
        return self.dropout(x_BTD, None if keys is None else keys[0])

    def run_blocks(
        self,
        x_BTD: jax.Array,
        batch: Batch,
        key: jax.Array | None = None,
        layers: tuple[Any, Any] = (0, None),
    ) -> tuple[jax.Array, dict[Any, jax.Array]]:
        """Run this network's blocks, which may be only some of the model's blocks.

        Args:
            key: dropout key; None disables dropout.
            layers: (first, end), the range of layer indices to run. `first` must be a multiple of
                the length of `layer_pattern`. Blocks with an index of `end` or more are padding and
                have no effect. If `end` is None, there is no padding.

        Returns:
            x_BTD, and the auxiliary losses (B,) by name, summed over the blocks. If
            `measures_blocks` is set, the second result is instead a dict that maps each of the L
            layer numbers to a float32 array (B,): the sum of squares of the block's output over
            this device's positions, or zeros for a layer that this network does not have.
        """
        at = self.positions(batch)
        inputs = [self.attention_inputs(kind, at) for kind in layer_pattern(self.config)]

        def run(block: Block, place: int, x_BTD: jax.Array, own: Any) -> tuple[jax.Array, Any]:
            keys_B, is_layer = own
            out_BTD, aux = block(x_BTD, keys_B, inputs[place])
            if self.measures_blocks:
                aux = {"squares": jnp.square(out_BTD.astype(jnp.float32)).sum(axis=(1, 2))}
            if is_layer is None:
                return out_BTD, aux
            aux = jax.tree.map(lambda aux_B: jnp.where(is_layer, aux_B, 0), aux)
            return jnp.where(is_layer, out_BTD, x_BTD), aux

        first, end = layers
        numbers_L = first + jnp.arange(self.n_layers)
        layer_keys = self.dropout_keys(batch, key, numbers_L)
        is_layer_L = None if end is None else numbers_L < end
        x_BTD, aux = self.scan_blocks(run, x_BTD, (layer_keys, is_layer_L))
        if self.measures_blocks:
            is_own_L = [(numbers_L == layer)[:, None] for layer in range(self.config.n_layer)]
            own = [jnp.where(is_own, aux["squares"], 0).sum(axis=0) for is_own in is_own_L]
            return x_BTD, dict(enumerate(own))
        return x_BTD, jax.tree.map(lambda aux_LB: aux_LB.sum(axis=0), aux)

    def head_loss(self, x_BTD: jax.Array, batch: Batch) -> LossParts:
        """Return the loss of the last block's output x_BTD; see `loss_parts` for the result."""
        x_BTD, output = self.last_norm(x_BTD), self.output_layer
        return loss_parts(x_BTD, batch.targets, batch.weights, output, self.loss_chunk)

    def head_scores(self, x_BTD: jax.Array, batch: Batch) -> TokenScores:
        """Return the loss of each target for the last block's output x_BTD; see `TokenScores`."""
        x_BTD, output = self.last_norm(x_BTD), self.output_layer
        return score_tokens(x_BTD, batch.targets, batch.weights, output, self.loss_chunk)

    def head_logits(self, x_BTD: jax.Array) -> jax.Array:
        """Return logits_BTV in float32 for this device's vocabulary shard; padding is -inf."""
        return self.output_layer.logits(self.last_norm(x_BTD))

    # Used by `embed`, `run_blocks` and the head.

    @property
    def n_layers(self) -> int:
        """Number of blocks in this network, including padding (see `run_blocks`)."""
        return len(jax.tree.leaves(nnx.state(self.layers))[0])

    @property
    def token_table(self) -> tuple[jax.Array, Any]:
        """This device's rows of the token embedding, and the token ID of the first row.

        See `vocab_shard`.
        """
        if self.keeps_tables:
            return self._kept_token_table
        return self.vocab_shard(self.token_embedding)

    @functools.cached_property
    def _kept_token_table(self) -> tuple[jax.Array, Any]:
        return self.vocab_shard(self.token_embedding)

    @property
    def output_layer(self) -> OutputLayer:
        """The output layer, which uses the token embedding if the weights are tied."""
        w_VD, vocab_offset = self.token_table if self.head is None else self.vocab_shard(self.head)
        return OutputLayer(w_VD, vocab_offset, self.config, self.parallel)

    def vocab_shard(self, table: nnx.Embed) -> tuple[jax.Array, Any]:
        """Return this device's rows of an embedding table, and the token ID of the first row.

        The rows are an array (V, D) in the compute dtype.
        """
        w_VD = gather_params(table, self.parallel).embedding[...].astype(self.dtype)
        V = padded_vocab_size(self.config.vocab_size)
        return self.parallel.local_vocab_shard(w_VD, V)

    def positions(self, batch: Batch) -> TokenPositions:
        """Return the positions (T,) of the tokens.

        With a document mask, return the positions and segments (B, T).
        """
        if self.end_of_text is not None:
            return TokenPositions(batch.positions, batch.segments)
        return TokenPositions(batch.positions[0])

    def attention_inputs(self, kind: LayerKind, at: TokenPositions) -> AttentionInputs:
        """Return the attention inputs that are the same for all layers of one kind.

        If the sequence is split over devices, they include the positions of whole rows.
        """
        rotation = None
        if self.config.position == "rope":
            size = self.config.head_size
            rotation = make_rotation(size, at.positions, kind.rope_theta, kind.rope_scaling)
        row_at = gather_positions(at, self.parallel.sequence_axes)
        return AttentionInputs(self.attend, row_at, rotation, kind.window)

    def dropout_keys(
        self, batch: Batch, key: jax.Array | None, numbers_N: jax.Array
    ) -> jax.Array | None:
        """Return keys_NB, a dropout key for each number and row, or None if there is no dropout.

        Keys depend on the row's number in the global batch, but not on the device.
        """
        if key is None or self.config.dropout == 0:
            return None
        keys_B = jax.vmap(lambda row: jax.random.fold_in(key, row))(batch.rows)
        return keys_for(keys_B, numbers_N).T

    def scan_blocks(
        self, run: Callable[..., tuple[Any, Any]], carry: Any, of_layers: Any
    ) -> tuple[Any, Any]:
        """Apply `carry, out = run(block, place, carry, x)` to each block in this network, in order.

        Args:
            run: function of a block, its index in `layer_pattern` (`place`), its input and x.
            carry: input of the first block.
            of_layers: tree of arrays that stack x of all blocks along the leading axis.

        Returns:
            The last carry, and `out` for all blocks, stacked along the leading axis.
        """
        graph, stacked = nnx.split(self.layers)
        n_places = len(layer_pattern(self.config))

        def layer(place: int, carry: Any, own: tuple[Any, Any]) -> Any:
            params, x = own
            block = gather_params(nnx.merge(graph, params), self.parallel)
            return run(block, place, carry, x)

        scans_one = self.scan_layers and n_places == 1
        layers = [
            rematerialized(functools.partial(layer, place), self.remat, in_loop=scans_one)
            for place in range(n_places)
        ]
        operands = stacked, of_layers
        if scans_one:
            return jax.lax.scan(layers[0], carry, operands)

        def run_in_order(carry: Any, operands: Any, n: int) -> tuple[Any, Any]:
            outs = []
            for i in range(n):
                own = jax.tree.map(operator.itemgetter(i), operands)
                carry, out = layers[i % n_places](carry, own)
                outs.append(out)
            return carry, jax.tree.map(lambda *outs: jnp.stack(outs), *outs)

        R, rest = divmod(self.n_layers, n_places)
        if not self.scan_layers or R < 2:
            return run_in_order(carry, operands, self.n_layers)
        patterns = R * n_places
        repeated = jax.tree.map(lambda x: x[:patterns].reshape(R, n_places, *x.shape[1:]), operands)
        carry, outs = jax.lax.scan(
            lambda carry, own: run_in_order(carry, own, n_places), carry, repeated
        )
        outs = jax.tree.map(lambda x: x.reshape(patterns, *x.shape[2:]), outs)
        if rest == 0:
            return carry, outs
        after = jax.tree.map(lambda x: x[patterns:], operands)
        carry, last = run_in_order(carry, after, rest)
        return carry, jax.tree.map(lambda *parts: jnp.concatenate(parts), outs, last)

    def last_norm(self, x_BTD: jax.Array) -> jax.Array:
        """Apply the final norm. Return the output layer's input, with T not split over `tensor`."""
        x_BTD = gather_params(self.norm, self.parallel)(x_BTD)  # B/b T/s D
        return self.parallel.copy_to_tensor_region(x_BTD)  # T/s -> T: B/b T D


def gpt_graph(config: ModelConfig, **options: Any) -> nnx.GraphDef:
    """Return the network's `GraphDef` for `nnx.merge`, without allocating parameters.

    `options` are keyword arguments of `GPT` other than `rngs`.
    """
    return nnx.graphdef(nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0), **options)))


def gather_params(module: nnx.Module, parallel: ParallelContext) -> Any:
    """Return the module with `parallel.param` applied to all parameters except matrices.

    The matmuls of `ParallelContext` gather the matrices.
    """
    graph, params = nnx.split(module)

    def ready(_: tuple[Any, ...], param: nnx.Param) -> nnx.Param:
        if param.get_metadata()["role"] == "matrix":
            return param
        return param.replace(parallel.param(param.get_value()))

    return nnx.merge(graph, nnx.map_state(ready, params))


def embed_tokens(w_VD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
    """Look up tokens in this device's shard w_VD, and return rows_BTD in w_VD's dtype.

    The rows of tokens outside the shard are 0. `tokens_BT` are int32 token IDs minus the ID of the
    shard's first row.
    """
    is_here_BT = (tokens_BT >= 0) & (tokens_BT < w_VD.shape[0])
    # Use float32, because a row's gradient is a sum over all occurrences of its token.
    rows_BTD = w_VD.astype(jnp.float32)[jnp.where(is_here_BT, tokens_BT, 0)]
    return jnp.where(is_here_BT[..., None], rows_BTD, 0).astype(w_VD.dtype)
