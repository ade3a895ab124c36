"""GPT-2 in flax.nnx: the network as equations, without a word about devices.

Shapes: B batch, T sequence, D embed, H heads, K head dim, F mlp, V vocab, L layers. Every
parameter names its logical axes; `distributed.partition` says where they live. The parameters of
the L blocks are stacked along a leading `layers` axis, one array per kind of weight.
"""

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental.layout import Layout, with_layout_constraint

from jaxgpt.config import ModelConfig
from jaxgpt.kernels.gelu import gelu
from jaxgpt.kernels.norm import LayerNorm
from jaxgpt.models.attention import Attention, drop_elements, xla_attention
from jaxgpt.models.kv_cache import Cache, Caches
from jaxgpt.parallel.remat import rematerialized
from jaxgpt.parallel.sharding import Params
from jaxgpt.parallel.tensor import ONE_DEVICE, OneDevice

INIT_STD = 0.02  # GPT-2's, for every matrix and embedding
VOCAB_MULTIPLE = 128  # the embedding's rows are padded to this, which most meshes divide


def normal(std: float) -> nnx.Initializer:
    return nnx.initializers.normal(std)


class Linear(nnx.Module):
    """x W + b, where W may be split over devices by columns or by rows."""

    def __init__(
        self,
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        axes: tuple[str | None, ...],
        std: float,
        multiply: Callable[[jax.Array, Any, int], jax.Array],
        *,
        dtype: jnp.dtype,
        use_bias: bool,
        rngs: nnx.Rngs,
    ):
        """A layer with normal weights and zero biases.

        Args:
            inputs: dimensions of x, its last ones, that are summed over.
            axes: logical axes of W, which has the shape (*inputs, *outputs).
            multiply: (x, W, number of inputs) -> x W, with the devices that share W.
        """
        self.n_inputs, self.dtype, self.multiply = len(inputs), dtype, multiply
        kernel = normal(std)(rngs.params(), (*inputs, *outputs), jnp.float32)
        self.kernel = nnx.Param(kernel, logical_axes=axes)
        # What is added after a sum over devices is small: every device keeps it whole.
        own = tuple(axis if axis != "embed" else None for axis in axes[self.n_inputs :])
        bias = nnx.Param(jnp.zeros(outputs), logical_axes=own) if use_bias else None
        self.bias = nnx.data(bias)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.multiply(x.astype(self.dtype), self.kernel.get_value(), self.n_inputs)
        # In float32, as then its gradient is, which sums over all tokens: see `look_up`.
        return y if self.bias is None else (y + self.bias.get_value()).astype(self.dtype)


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: jnp.dtype,
        attend: Attention,
        devices: OneDevice,
        *,
        rngs: nnx.Rngs,
    ):
        D, H, F = config.n_embd, config.n_head, 4 * config.n_embd
        K = D // H
        self.attend, self.devices = attend, devices
        self.norm_1 = layer_norm(config, dtype, devices, rngs)
        self.norm_2 = layer_norm(config, dtype, devices, rngs)
        self.dropout = config.dropout

        columns, rows = devices.by_columns, devices.by_rows
        linear = functools.partial(Linear, dtype=dtype, use_bias=config.bias, rngs=rngs)
        # Residual branches sum over 2L projections: scaling them keeps the variance at 1.
        small = INIT_STD / math.sqrt(2 * config.n_layer)
        self.qkv = linear((D,), (3, H, K), ("embed", None, "heads", None), INIT_STD, columns)
        self.out = linear((H, K), (D,), ("heads", None, "embed"), small, rows)
        self.up = linear((D,), (F,), ("embed", "mlp"), INIT_STD, columns)
        self.down = linear((F,), (D,), ("mlp", "embed"), small, rows)

    def __call__(
        self,
        x_BTD: jax.Array,
        keys_B: jax.Array | None = None,
        cache: Cache | None = None,
        layer: Any = None,
        first: Any = 0,
    ) -> tuple[jax.Array, Cache | None]:
        """One layer.

        Args:
            keys_B: a key for every row; without, there is no dropout.
            cache: of the positions before `first`, where x_BTD begins; without, these are all.
            layer: the number of this one in the cache; None where the cache is its own.

        Returns:
            x_BTD for the next layer, and the cache with these positions.
        """
        keys = (None,) * 3 if keys_B is None else keys_for(keys_B, jnp.arange(3)).T
        drop = functools.partial(dropout, self.dropout, self.devices)

        qkv_BTCHK = self.qkv(self.norm_1(x_BTD))
        # Not by indexing, whose gradient is a sum of arrays that are zero elsewhere.
        q_BTHK, k_BTHK, v_BTHK = (x.squeeze(2) for x in jnp.split(qkv_BTCHK, 3, axis=2))
        heads_H = self.devices.first(q_BTHK.shape[2]) + jnp.arange(q_BTHK.shape[2])
        keys_BH = keys_for(keys[0], heads_H)
        k_BSHK, v_BSHK = k_BTHK, v_BTHK
        if cache is not None:
            cache = cache.extended(layer, k_BTHK, v_BTHK, first)
            k_BSHK, v_BSHK = (x_HKS.transpose(2, 0, 1)[None] for x_HKS in cache.of(layer))
        if k_BSHK.shape == q_BTHK.shape:  # all positions at once, as in training
            mixed_BTHK = self.attend(q_BTHK, k_BSHK, v_BSHK, keys_BH)
        else:
            mixed_BTHK = xla_attention(q_BTHK, k_BSHK, v_BSHK, first=first)
        x_BTD = x_BTD + drop(self.out(mixed_BTHK), keys[1])

        hidden_BTF = self.up(self.norm_2(x_BTD))
        mlp_BTD = self.down(gelu(hidden_BTF))
        return x_BTD + drop(mlp_BTD, keys[2]), cache


class GPT(nnx.Module):
    """GPT-2: tokens_BT -> logits_BTV. The embedding of tokens is also the output layer."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: jnp.dtype = jnp.float32,
        attend: Attention = xla_attention,
        devices: OneDevice = ONE_DEVICE,
        scan_layers: bool = False,
        remat: str = "none",
        rngs: nnx.Rngs,
    ):
        """A model with float32 parameters.

        Args:
            config: with `vocab_size` set.
            dtype: of the computation, to which logits are rounded; they come as float32.
            attend: what `attention.make_attention` gives.
            devices: how this device and the others share the work.
            scan_layers: compile one block and loop over it, in place of L blocks.
            remat: what of a layer the backward pass computes again, see `remat`.
        """
        assert config.vocab_size is not None
        self.config, self.dtype = config, dtype
        self.devices, self.scan_layers, self.remat = devices, scan_layers, remat
        V, D, T = config.vocab_size, config.n_embd, config.block_size

        def padded_normal(key, shape, dtype):
            real = normal(INIT_STD)(key, (V, D), dtype)
            return jnp.pad(real, ((0, shape[0] - V), (0, 0)))

        self.wte = embedding(padded_vocab_size(V), D, padded_normal, ("vocab", "embed"), rngs)
        self.wpe = embedding(T, D, normal(INIT_STD), (None, "embed"), rngs)
        self.dropout = config.dropout

        @nnx.vmap
        def make_block(key):
            return Block(config, dtype, attend, devices, rngs=nnx.Rngs(params=key))

        self.blocks = make_block(jax.random.split(rngs.params(), config.n_layer))
        self.norm = layer_norm(config, dtype, devices, rngs)

    def __call__(self, tokens_BT: jax.Array, keys_B: jax.Array | None = None) -> jax.Array:
        """Logits (float32, padded vocabulary, padding at -inf); dropout only with keys.

        Of a vocabulary that is split over devices, this device's share.
        """
        x_BTD, w_VD, first = self.hidden(tokens_BT, keys_B)
        return logits(x_BTD, w_VD, first, self.config.vocab_size)

    def read(self, caches: Caches, tokens_1T: jax.Array, first: Any) -> tuple[jax.Array, Caches]:
        """Logits_1V of the token after these, and the caches with these; without dropout.

        Args:
            caches: of the positions before `first`.
            tokens_1T: of the positions first, first + 1, ..., which must be below block_size.
        """
        x_1TD, w_VD, first_token, caches = self._hidden(tokens_1T, None, caches, first)
        return logits(x_1TD[:, -1], w_VD, first_token, self.config.vocab_size), caches

    def hidden(
        self, tokens_BT: jax.Array, keys_B: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array, Any]:
        """What the output layer multiplies: x_BTD, this device's w_VD, its first token."""
        return self._hidden(tokens_BT, keys_B)[:3]

    def _hidden(
        self,
        tokens_BT: jax.Array,
        keys_B: jax.Array | None,
        caches: Caches | None = None,
        first: Any = 0,
    ) -> tuple[jax.Array, jax.Array, Any, Caches | None]:
        if self.config.dropout == 0:
            keys_B = None
        L = self.config.n_layer
        keys = None if keys_B is None else keys_for(keys_B, jnp.arange(L + 1)).T
        layer_keys, own_keys = (None, None) if keys is None else (keys[:L], keys[L])
        T = self.devices.positions(tokens_BT.shape[1])
        V = padded_vocab_size(self.config.vocab_size)
        whole = functools.partial(with_weights, devices=self.devices)
        wte_VD, wpe_TD = whole(self.wte).embedding[...], whole(self.wpe).embedding[...]
        w_VD, first_token = self.devices.share(wte_VD.astype(self.dtype), V)
        wpe_TD = jax.lax.dynamic_slice_in_dim(wpe_TD, first + self.devices.first_position(T), T)
        x_BTD = self.devices.leave(look_up(w_VD, tokens_BT - first_token))
        x_BTD = (x_BTD + wpe_TD).astype(self.dtype)  # float32, as a layer's bias
        if caches is None and not self.devices.on_cpu:
            # Or XLA lays B last, as the gradient of wpe_TD sums over it, and on GPUs every layer
            # transposes to and fro: 15 % of what they move in a step of GPT-2.
            x_BTD = with_layout_constraint(x_BTD, Layout(major_to_minor=(0, 1, 2)))
        x_BTD = dropout(self.dropout, self.devices, x_BTD, own_keys)
        x_BTD, caches = self._layers(x_BTD, layer_keys, caches, first)
        return self.devices.enter(whole(self.norm)(x_BTD)), w_VD, first_token, caches

    def _layers(
        self, x_BTD: jax.Array, keys_LB: jax.Array | None, caches: Caches | None, first: Any
    ) -> tuple[jax.Array, Caches | None]:
        L = self.config.n_layer
        graph, stacked = nnx.split(self.blocks)

        def layer(carry, given):
            x_BTD, cache = carry
            params, keys_B, number = given
            block = with_weights(nnx.merge(graph, params), self.devices)
            return block(x_BTD, keys_B, cache, number, first), None

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


def with_weights(module: nnx.Module, devices: OneDevice) -> Any:
    """The module with its parameters ready for use, but for kernels: `Linear` sees to those."""
    graph, params = nnx.split(module)

    def ready(path: tuple[Any, ...], param: nnx.Param) -> nnx.Param:
        if path[-1] == "kernel":
            return param
        return param.replace(devices.weight(param.get_value()))

    return nnx.merge(graph, nnx.map_state(ready, params))


def look_up(w_VD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
    """Rows of w_VD; zeros for tokens that are not among them, but on another device."""
    is_here_BT = (tokens_BT >= 0) & (tokens_BT < w_VD.shape[0])
    # In float32, since the gradient of a row is the sum over all places where its token stands.
    rows_BTD = w_VD.astype(jnp.float32)[jnp.where(is_here_BT, tokens_BT, 0)]
    return jnp.where(is_here_BT[..., None], rows_BTD, 0).astype(w_VD.dtype)


def logits(x_BTD: jax.Array, w_VD: jax.Array, first: Any, vocab_size: int) -> jax.Array:
    """Scores of the tokens first, first + 1, ...; -inf for those that only pad the vocabulary.

    They are rounded to the operands' dtype, as nanoGPT's and llm.c's: of GPT-2's step on GPUs, to
    write and read them in float32 would take another 7 %.
    """
    logits_BTV = jnp.einsum("...D,VD->...V", x_BTD, w_VD).astype(jnp.float32)
    is_token_V = first + jnp.arange(w_VD.shape[0]) < vocab_size
    return jnp.where(is_token_V, logits_BTV, -jnp.inf)


def dropout(
    rate: float, devices: OneDevice, x_BTD: jax.Array, keys_B: jax.Array | None
) -> jax.Array:
    """Dropout that depends on a row's key and the position, on no matter which device they are."""
    if keys_B is None:
        return x_BTD
    B, T, D = x_BTD.shape
    keys_BT = keys_for(keys_B, devices.first_position(T) + jnp.arange(T))
    # N = B T: with two axes XLA puts B last on GPUs, and transposes activations to and fro.
    drop = jax.vmap(lambda x_D, key: drop_elements(x_D, rate, key))
    return drop(x_BTD.reshape(B * T, D), keys_BT.reshape(B * T)).reshape(x_BTD.shape)


def keys_for(keys_B: jax.Array | None, numbers_N: jax.Array) -> jax.Array | None:
    """keys_BN: for every row a key of each number, the same on whichever device."""
    if keys_B is None:
        return None
    fold_in = jax.random.fold_in
    return jax.vmap(lambda key: jax.vmap(lambda n: fold_in(key, n))(numbers_N))(keys_B)


def layer_norm(
    config: ModelConfig, dtype: jnp.dtype, devices: OneDevice, rngs: nnx.Rngs
) -> nnx.LayerNorm:
    """A norm whose scale every device keeps: gathering it would cost more than it saves."""
    axes = {"logical_axes": (None,)}
    return LayerNorm(
        config.n_embd,
        by_products=devices.on_cpu,
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


@functools.cache
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
