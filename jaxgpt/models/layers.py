"""Transformer layers, which label weights with logical axes and do not depend on the mesh.

A weight's metadata consists of the logical axis of each dim (`logical_axes`), the `role` and, for a
matrix or an embedding, the number of input dims (`n_inputs`). `models.weights` lists all weights,
and `parallel.sharding` maps the logical axes to mesh axes.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxgpt.config import ModelConfig, UsageError
from jaxgpt.kernels.attention import Attention, TokenPositions
from jaxgpt.kernels.dropout import drop_elements
from jaxgpt.kernels.norm import LayerNorm, RMSNorm, RMSNorm1p
from jaxgpt.models.rope import Rotation
from jaxgpt.parallel.sharding import LogicalAxes
from jaxgpt.parallel.tensor import ParallelContext

INIT_STD = 0.02  # GPT-2's value; row-parallel layers divide it by sqrt(2L)
VOCAB_MULTIPLE = 128  # vocabularies are padded to a multiple of 128, so that they can be sharded

# (x, W, number of dims to contract) -> x W
Multiply = Callable[[jax.Array, Any, int], jax.Array]


@dataclass(frozen=True)
class LayerBuilder:
    """Options and constructors of linear layers, norms and dropout."""

    config: ModelConfig
    dtype: jnp.dtype  # compute dtype; parameters are float32
    parallel: ParallelContext
    rngs: nnx.Rngs

    def column_parallel(
        self,
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        axes: LogicalAxes,
        use_bias: bool = False,
    ) -> "Linear":
        """Return a column-parallel linear layer, whose outputs are split over `tensor`.

        Outputs that are not divisible by `tensor` are replicated. The standard deviation of the
        initial weights is 0.02.

        Args:
            inputs: sizes of the input dims.
            outputs: sizes of the output dims.
            axes: logical axes of all dims of the weight, inputs first.
            use_bias: add a bias even if model.bias=False.
        """
        multiply = self.parallel.column_parallel_matmul
        return Linear(self, inputs, outputs, axes, INIT_STD, multiply, use_bias)

    def row_parallel(
        self, inputs: tuple[int, ...], outputs: tuple[int, ...], axes: LogicalAxes
    ) -> "Linear":
        """Return a row-parallel linear layer, whose inputs are split over `tensor`.

        The standard deviation of the initial weights is 0.02 / sqrt(2L), as in GPT-2.

        Args:
            inputs: sizes of the input dims.
            outputs: sizes of the output dims.
            axes: logical axes of all dims of the weight, inputs first.

        Raises:
            UsageError: if `tensor` does not divide the first input dim. If the dim were replicated,
                each device would compute the whole product, and the all-reduce would add it several
                times.
        """
        if inputs[0] % self.parallel.tensor:
            raise UsageError(
                f"parallel.mesh: tensor={self.parallel.tensor} does not divide the {inputs[0]} "
                f"inputs ({axes[0]}) of a row-parallel layer; choose a size that does"
            )
        std = INIT_STD / math.sqrt(2 * self.config.n_layer)
        return Linear(self, inputs, outputs, axes, std, self.parallel.row_parallel_matmul)

    def norm(self) -> LayerNorm | RMSNorm:
        """Return the norm layer over D that model.norm selects.

        Its parameters are not sharded over `fsdp` or `tensor`, because gathering them would cost
        more than sharding them saves.
        """
        if self.config.norm != "layernorm":
            return self.rms_norm(self.config.n_embd, None)
        return LayerNorm(
            self.config.n_embd,
            epsilon=self.config.norm_eps,
            use_bias=self.config.bias,
            dtype=self.dtype,
            scale_metadata={"logical_axes": (None,), "role": "scale"},
            bias_metadata={"logical_axes": (None,), "role": "bias"},
            rngs=self.rngs,
        )

    def rms_norm(self, size: int, axis: str | None) -> RMSNorm:
        """Return an RMSNorm over the last dim, or an `RMSNorm1p` if model.norm=rmsnorm_1p.

        Args:
            size: size of the last dim.
            axis: logical axis of the scale, or None.
        """
        norm = RMSNorm1p if self.config.norm == "rmsnorm_1p" else RMSNorm
        return norm(
            size,
            epsilon=self.config.norm_eps,
            dtype=self.dtype,
            scale_metadata={"logical_axes": (axis,), "role": "scale"},
            rngs=self.rngs,
        )

    def dropout(self, x_BTD: jax.Array, keys_B: jax.Array | None) -> jax.Array:
        """Apply dropout at the rate model.dropout.

        The mask depends on the row's key and the token's position in the row, but not on the
        device.

        Args:
            keys_B: a dropout key for each row; if None, dropout is disabled.
        """
        if keys_B is None:
            return x_BTD
        B, T, D = x_BTD.shape
        keys_BT = keys_for(keys_B, self.parallel.sequence_offset(T) + jnp.arange(T))
        # Flatten B and T. Otherwise, XLA makes B the minor dimension on GPUs and transposes
        # activations back and forth.
        drop = jax.vmap(lambda x_D, key: drop_elements(x_D, self.config.dropout, key))
        return drop(x_BTD.reshape(B * T, D), keys_BT.reshape(B * T)).reshape(x_BTD.shape)


class Linear(nnx.Module):
    """Linear layer x W + b, with a bias only if model.bias or `use_bias` is set.

    W has shape (*inputs, *outputs), b has shape `outputs`, and both are float32 parameters. The
    last dims of x have the sizes `inputs`. The result has the compute dtype.
    """

    def __init__(
        self,
        build: LayerBuilder,
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        axes: LogicalAxes,
        std: float,
        multiply: Multiply,
        use_bias: bool = False,
    ):
        self.n_inputs, self.dtype, self.multiply = len(inputs), build.dtype, multiply
        draw = nnx.initializers.normal(std)
        kernel = draw(build.rngs.params(), (*inputs, *outputs), jnp.float32)
        self.kernel = nnx.Param(kernel, logical_axes=axes, role="matrix", n_inputs=self.n_inputs)
        # A row-parallel layer adds its bias after the all-reduce. The bias is small, so it is
        # replicated.
        own = tuple(axis if axis != "embed" else None for axis in axes[self.n_inputs :])
        bias = nnx.Param(jnp.zeros(outputs), logical_axes=own, role="bias")
        self.bias = nnx.data(bias if build.config.bias or use_bias else None)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.multiply(x.astype(self.dtype), self.kernel.get_value(), self.n_inputs)
        (y,) = self.add_bias((y,), split=False)
        return y

    def add_bias(self, ys: tuple[jax.Array, ...], split: bool) -> tuple[jax.Array, ...]:
        """Add b to x W in float32, so that the bias's gradient is a float32 sum.

        `ys` has the slices of x W along the first output dim if `split` is set, and otherwise only
        x W. The results have the compute dtype. Without a bias, `ys` is returned unchanged.
        """
        if self.bias is None:
            return ys
        b = self.bias.get_value()
        biases = b if split else (b,)
        return tuple((y + own).astype(self.dtype) for y, own in zip(ys, biases, strict=True))


class LayerKind(NamedTuple):
    """Attention options that may differ between layers."""

    window: int | None  # maximum number of visible keys, including the query's own; None means all
    rope_theta: float  # RoPE base
    rope_scaling: tuple[float, ...]  # in the form of model.rope_scaling; () means no scaling


def layer_pattern(config: ModelConfig) -> tuple[LayerKind, ...]:
    """Return the repeating pattern of layer kinds.

    If all layers in model.layers are of the same kind, the pattern has a single entry.
    """
    everywhere = LayerKind(None, config.rope_theta, config.rope_scaling)
    local = everywhere._replace(window=config.sliding_window)
    if config.local_rope_theta is not None:
        local = LayerKind(config.sliding_window, config.local_rope_theta, ())
    kinds = {"global": everywhere, "local": local}
    default = "local" if config.sliding_window is not None else "global"
    pattern = tuple(kinds[name] for name in config.layers or (default,))
    return pattern if len(set(pattern)) > 1 else pattern[:1]


class AttentionInputs(NamedTuple):
    """Attention inputs that layers of the same kind share. Hidden states are not included."""

    attend: Attention
    at: TokenPositions  # of whole rows of the batch, even if the sequence is split over devices
    rotation: Rotation | None  # at this device's positions; None unless model.position=rope
    window: int | None


class SelfAttention(nnx.Module):
    """Causal attention with H query heads and G key-value heads of size K."""

    def __init__(self, build: LayerBuilder):
        config = build.config
        D, H, G, K = config.n_embd, config.n_head, config.kv_heads, config.head_size
        self.parallel, self.n_head, self.n_kv_head = build.parallel, H, G
        # The kernels divide the scores by sqrt(K); this factor corrects for query_pre_attn_scalar.
        self.query_factor = math.sqrt(K / (config.query_pre_attn_scalar or K))

        def project(outputs: tuple[int, ...], axes: LogicalAxes) -> Linear:
            return build.column_parallel((D,), outputs, ("embed", *axes), config.qkv_bias)

        self.qkv = self.q = self.kv = self.q_norm = self.k_norm = nnx.data(None)
        if G == H:
            self.qkv = nnx.data(project((3, H, K), ("parts", "heads", None)))
        else:
            self.q = nnx.data(project((H, K), ("heads", None)))
            self.kv = nnx.data(project((2, G, K), ("parts", "kv_heads", None)))
        if config.qk_norm:
            self.q_norm, self.k_norm = (nnx.data(build.rms_norm(K, "head_dim")) for _ in range(2))
        self.out = build.row_parallel((H, K), (D,), ("heads", None, "embed"))

    def __call__(
        self, x_BTD: jax.Array, keys_B: jax.Array | None, inputs: AttentionInputs
    ) -> jax.Array:
        q_BTHK, k_BTGK, v_BTGK = self.project(x_BTD)  # T/s -> T: B/b T H/t K, B/b T G/t K
        if self.q_norm is not None:
            q_BTHK, k_BTGK = self.q_norm(q_BTHK), self.k_norm(k_BTGK)
        if inputs.rotation is not None:
            q_BTHK, k_BTGK = inputs.rotation(q_BTHK), inputs.rotation(k_BTGK)
        if self.query_factor != 1:
            q_BTHK = q_BTHK * jnp.asarray(self.query_factor, q_BTHK.dtype)
        keys_BH = keys_for(keys_B, self.local_heads(q_BTHK.shape[2]))
        at, window = inputs.at, inputs.window
        out_BTHK = inputs.attend(q_BTHK, k_BTGK, v_BTGK, at, at, window, keys_BH)  # B/b T H/t K
        return self.out(out_BTHK)  # +t -> T/s: B/b T/s D

    def project(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return q_BTHK, k_BTGK and v_BTGK for this device's heads.

        T includes the positions of all `tensor` ranks. If `tensor` does not divide the number of
        key-value heads, each query head gets a copy of its key-value head, so that G = H.
        """
        if self.qkv is not None:
            layers, splits = (self.qkv,), (True,)
        else:
            layers, splits = (self.q, self.kv), (False, True)
        x_BTD = x_BTD.astype(layers[0].dtype)
        kernels = [layer.kernel.get_value() for layer in layers]
        products = self.parallel.column_parallel_matmuls(x_BTD, kernels, 1, splits)
        parts = map(Linear.add_bias, layers, products, splits)
        q_BTHK, k_BTGK, v_BTGK = itertools.chain.from_iterable(parts)
        H, G = q_BTHK.shape[2], k_BTGK.shape[2]
        if H < self.n_head and G == self.n_kv_head:
            # `tensor` does not divide G: each device computes all key-value heads and selects the
            # ones that its query heads use.
            own_H = self.local_heads(H) * G // self.n_head
            k_BTGK, v_BTGK = jnp.take(k_BTGK, own_H, axis=2), jnp.take(v_BTGK, own_H, axis=2)
        return q_BTHK, k_BTGK, v_BTGK

    def local_heads(self, n: int) -> jax.Array:
        """Return the indices of this device's n query heads: int (n,)."""
        return self.parallel.tensor_offset(n) + jnp.arange(n)


def embedding(
    n_rows: int, config: ModelConfig, rngs: nnx.Rngs, role: str, axis: str | None
) -> nnx.Embed:
    """Return a float32 embedding table with `n_rows` rows of n_embd elements.

    The standard deviation of the initial rows is 0.02. If `axis` is `vocab`, the table is padded
    with rows of zeros to `padded_vocab_size`.

    Args:
        role: role of the weight, such as `token_embedding`.
        axis: logical axis of the rows, `vocab` or None.
    """
    n_padded = padded_vocab_size(n_rows) if axis == "vocab" else n_rows

    def padded_normal(key, shape, dtype):
        real = nnx.initializers.normal(INIT_STD)(key, (n_rows, config.n_embd), dtype)
        return jnp.pad(real, ((0, shape[0] - n_rows), (0, 0)))

    return nnx.Embed(
        n_padded,
        config.n_embd,
        embedding_init=padded_normal,
        embedding_metadata={"logical_axes": (axis, "embed"), "role": role, "n_inputs": 1},
        rngs=rngs,
    )


def padded_vocab_size(vocab_size: int) -> int:
    """Return the padded vocabulary size: `vocab_size` rounded up to a multiple of 128."""
    return -(-vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def keys_for(keys_B: jax.Array | None, numbers_N: jax.Array) -> jax.Array | None:
    """Return keys_BN, with each number folded into each row's key, or None if `keys_B` is None."""
    if keys_B is None:
        return None
    fold_in = jax.random.fold_in
    return jax.vmap(lambda key: jax.vmap(lambda n: fold_in(key, n))(numbers_N))(keys_B)
