"""GPT-2 in flax.nnx: the network as equations, without a word about devices.

Shapes: B batch, T sequence, D embed, H heads, K head dim, F mlp, V vocab, L layers. Every
parameter names its logical axes; `distributed.partition` says where they live. The parameters of
the L blocks are stacked along a leading `layers` axis, one array per kind of weight.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxgpt.config import ModelConfig
from jaxgpt.model.attention import Attention, xla_attention

INIT_STD = 0.02  # GPT-2's, for every matrix and embedding
VOCAB_MULTIPLE = 128  # the embedding's rows are padded to this, which most meshes divide

Constrain = Callable[[jax.Array, tuple[str | None, ...]], jax.Array]
Params = dict[str, Any]


def normal(std: float) -> nnx.Initializer:
    return nnx.initializers.normal(std)


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: jnp.dtype,
        attend: Attention,
        constrain: Constrain,
        *,
        rngs: nnx.Rngs,
    ):
        D, H, F = config.n_embd, config.n_head, 4 * config.n_embd
        K = D // H
        self.attend, self.constrain = attend, constrain
        self.norm_1 = layer_norm(config, dtype, rngs)
        self.norm_2 = layer_norm(config, dtype, rngs)
        self.dropout = nnx.Dropout(config.dropout)

        def linear(inputs, outputs, axes, std):
            n_in = 1 if isinstance(inputs, int) else len(inputs)
            return nnx.LinearGeneral(
                inputs,
                outputs,
                axis=tuple(range(-n_in, 0)),
                use_bias=config.bias,
                dtype=dtype,
                kernel_init=normal(std),
                kernel_metadata={"logical_axes": axes},
                bias_metadata={"logical_axes": axes[n_in:]},
                rngs=rngs,
            )

        # Residual branches sum over 2L projections: scaling them keeps the variance at 1.
        residual_std = INIT_STD / math.sqrt(2 * config.n_layer)
        self.qkv = linear(D, (3, H, K), ("embed", None, "heads", None), INIT_STD)
        self.out = linear((H, K), D, ("heads", None, "embed"), residual_std)
        self.up = linear(D, F, ("embed", "mlp"), INIT_STD)
        self.down = linear(F, D, ("mlp", "embed"), residual_std)

    def __call__(self, x_BTD: jax.Array, key: jax.Array | None = None) -> jax.Array:
        keys = (None,) * 3 if key is None else jax.random.split(key, 3)
        drop = functools.partial(self.dropout, deterministic=key is None)

        qkv_BTCHK = self.constrain(self.qkv(self.norm_1(x_BTD)), QKV_AXES)
        q_BTHK, k_BTHK, v_BTHK = (qkv_BTCHK[:, :, c] for c in range(3))
        mixed_BTHK = self.attend(q_BTHK, k_BTHK, v_BTHK, keys[0])
        x_BTD = self.constrain(x_BTD + drop(self.out(mixed_BTHK), rngs=keys[1]), RESIDUAL_AXES)

        hidden_BTF = self.constrain(self.up(self.norm_2(x_BTD)), HIDDEN_AXES)
        mlp_BTD = self.down(jax.nn.gelu(hidden_BTF, approximate=False))
        return self.constrain(x_BTD + drop(mlp_BTD, rngs=keys[2]), RESIDUAL_AXES)


RESIDUAL_AXES = ("batch", "sequence", None)
QKV_AXES = ("batch", "sequence", None, "heads", None)
HIDDEN_AXES = ("batch", "sequence", "mlp")
LOGITS_AXES = ("batch", "sequence", "vocab")


class GPT(nnx.Module):
    """GPT-2: tokens_BT -> logits_BTV. The embedding of tokens is also the output layer."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: jnp.dtype = jnp.float32,
        attend: Attention = xla_attention,
        constrain: Constrain = lambda x, axes: x,
        scan_layers: bool = False,
        gather_again: bool = False,
        rngs: nnx.Rngs,
    ):
        """A model with float32 parameters.

        Args:
            config: with `vocab_size` set.
            dtype: of the computation; logits are float32.
            attend: what `attention.make_attention` gives.
            constrain: what `partition.activation_constraint` gives.
            scan_layers: compile one block and loop over it, in place of L blocks.
            gather_again: bring a layer's weights together once more for the backward pass, in
                place of keeping all layers' whole weights until then (ZeRO-3).
        """
        assert config.vocab_size is not None
        self.config, self.dtype = config, dtype
        self.constrain, self.scan_layers = constrain, scan_layers
        self.gather_again = gather_again
        V, D, T = config.vocab_size, config.n_embd, config.block_size

        def padded_normal(key, shape, dtype):
            real = normal(INIT_STD)(key, (V, D), dtype)
            return jnp.pad(real, ((0, shape[0] - V), (0, 0)))

        self.wte = embedding(padded_vocab_size(V), D, padded_normal, ("vocab", "embed"), rngs)
        self.wpe = embedding(T, D, normal(INIT_STD), (None, "embed"), rngs)
        self.dropout = nnx.Dropout(config.dropout)

        @nnx.vmap
        def make_block(key):
            return Block(config, dtype, attend, constrain, rngs=nnx.Rngs(params=key))

        self.blocks = make_block(jax.random.split(rngs.params(), config.n_layer))
        self.norm = layer_norm(config, dtype, rngs)

    def __call__(self, tokens_BT: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """Logits (float32, padded vocabulary, padding at -inf); dropout only with a `key`."""
        embedding_key = layers_key = None
        if key is not None and self.config.dropout > 0:
            embedding_key, layers_key = jax.random.split(key)
        T = tokens_BT.shape[1]
        wte_VD = self.constrain(self.wte.embedding[...], ("vocab", "embed")).astype(self.dtype)
        wpe_TD = self.constrain(self.wpe.embedding[...], (None, "embed")).astype(self.dtype)
        x_BTD = self.constrain(wte_VD[tokens_BT] + wpe_TD[:T], RESIDUAL_AXES)
        x_BTD = self.dropout(x_BTD, deterministic=embedding_key is None, rngs=embedding_key)
        x_BTD = self.norm(self._layers(x_BTD, layers_key))
        logits_BTV = jnp.einsum("BTD,VD->BTV", x_BTD, wte_VD, preferred_element_type=jnp.float32)
        is_token_V = jnp.arange(wte_VD.shape[0]) < self.config.vocab_size
        return self.constrain(jnp.where(is_token_V, logits_BTV, -jnp.inf), LOGITS_AXES)

    def _layers(self, x_BTD: jax.Array, key: jax.Array | None) -> jax.Array:
        L = self.config.n_layer
        graph, stacked = nnx.split(self.blocks)
        keys = None if key is None else jax.random.split(key, L)

        def layer(x_BTD, block_and_key):
            params, key = block_and_key
            # Under ZeRO-3 this is where a layer's weights come together on every device.
            params = jax.tree.map(
                lambda v: v.replace(self.constrain(v[...], v.logical_axes)),
                params,
                is_leaf=lambda v: isinstance(v, nnx.Param),
            )
            return nnx.merge(graph, params)(x_BTD, key), None

        if self.gather_again:
            layer = jax.checkpoint(layer, policy=_not_gathered, prevent_cse=not self.scan_layers)
        if self.scan_layers:
            return jax.lax.scan(layer, x_BTD, (stacked, keys))[0]
        for i in range(L):
            x_BTD, _ = layer(x_BTD, jax.tree.map(lambda leaf: leaf[i], (stacked, keys)))  # noqa: B023
        return x_BTD


def _not_gathered(primitive: Any, *_: Any, **__: Any) -> bool:
    """Keep everything for the backward pass but what a sharding constraint returned."""
    return primitive.name != "sharding_constraint"


def layer_norm(config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs) -> nnx.LayerNorm:
    """A norm whose scale every device keeps: gathering it would cost more than it saves."""
    axes = {"logical_axes": (None,)}
    return nnx.LayerNorm(
        config.n_embd,
        epsilon=1e-5,
        use_bias=config.bias,
        dtype=dtype,
        scale_metadata=axes,
        bias_metadata=axes,
        rngs=rngs,
    )


def embedding(
    rows: int, D: int, init: nnx.Initializer, axes: tuple[str | None, ...], rngs: nnx.Rngs
) -> nnx.Embed:
    return nnx.Embed(
        rows, D, embedding_init=init, embedding_metadata={"logical_axes": axes}, rngs=rngs
    )


def padded_vocab_size(vocab_size: int) -> int:
    """Rows of the embedding: `vocab_size` rounded up to a multiple of 128."""
    return -(-vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def abstract_params(config: ModelConfig) -> tuple[Params, Params]:
    """Shapes and logical axes of the parameters, without computing any.

    Returns:
        Two nested dicts of the same keys: `jax.ShapeDtypeStruct`s, and tuples of axis names with
        `layers` in front for the stacked blocks.
    """
    model = nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0)))
    state = nnx.state(model, nnx.Param)
    axes = {
        path: (("layers",) if path[0] == "blocks" else ()) + leaf.get_metadata()["logical_axes"]
        for path, leaf in nnx.to_flat_state(state)
    }
    return nnx.to_pure_dict(state), nnx.traversals.unflatten_mapping(axes)


def count_parameters(config: ModelConfig) -> tuple[int, int]:
    """Number of parameters, without padding of the vocabulary.

    Returns:
        (all, all but position embeddings): the second is how nanoGPT reports a model.
    """
    shapes, _ = abstract_params(config)
    padding = (padded_vocab_size(config.vocab_size) - config.vocab_size) * config.n_embd
    total = sum(math.prod(s.shape) for s in jax.tree.leaves(shapes)) - padding
    return total, total - config.block_size * config.n_embd
