"""The layers of a transformer. They name logical axes and know no mesh.

Every weight says what its dims mean (`logical_axes`), what it is (`role`), and a matrix how many of
its dims are inputs (`n_inputs`); `models.weights` lists them all, and `parallel` says where they
live.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxgpt.config import ModelConfig, UsageError
from jaxgpt.kernels.dropout import drop_elements
from jaxgpt.kernels.norm import LayerNorm, RMSNorm, RMSNorm1p
from jaxgpt.models.attention import Attention, TokenPositions
from jaxgpt.models.rope import Rotation
from jaxgpt.parallel.sharding import LogicalAxes
from jaxgpt.parallel.tensor import ParallelContext

INIT_STD = 0.02  # GPT-2's, for every matrix and embedding
VOCAB_MULTIPLE = 128  # the embedding's rows are padded to this, which most meshes divide

# x, W, number of dims that are summed over -> x W
Multiply = Callable[[jax.Array, Any, int], jax.Array]


@dataclass(frozen=True)
class LayerBuilder:
    """Options and constructors that the layers of a block share."""

    config: ModelConfig
    dtype: jnp.dtype  # of the computation; parameters are float32
    parallel: ParallelContext
    rngs: nnx.Rngs

    def column_parallel(
        self,
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        axes: LogicalAxes,
        use_bias: bool = False,
    ) -> "Linear":
        """Return a linear layer whose outputs are split over `tensor`, as `axes` say.

        `use_bias` gives it a bias also where model.bias does not.
        """
        multiply = self.parallel.column_parallel_matmul
        return Linear(self, inputs, outputs, axes, INIT_STD, multiply, use_bias)

    def row_parallel(
        self, inputs: tuple[int, ...], outputs: tuple[int, ...], axes: LogicalAxes
    ) -> "Linear":
        """Return a linear layer whose inputs are split, and whose result is added to the stream.

        2L of them add up in the residual stream: scaling them keeps its variance at 1. Raises
        `UsageError` if `tensor` does not divide the inputs: every device would add all of them up.
        """
        if inputs[0] % self.parallel.tensor:
            raise UsageError(
                f"parallel.mesh: tensor={self.parallel.tensor} does not divide the {inputs[0]} "
                f"inputs ({axes[0]}) of a layer that is split by rows; give one that does"
            )
        std = INIT_STD / math.sqrt(2 * self.config.n_layer)
        return Linear(self, inputs, outputs, axes, std, self.parallel.row_parallel_matmul)

    def norm(self) -> LayerNorm | RMSNorm:
        """Return a norm whose scale every device keeps: gathering it costs more than it saves."""
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
        """Return an RMSNorm over the last dim, of `size`, whose scale has this logical axis."""
        norm = RMSNorm1p if self.config.norm == "rmsnorm_1p" else RMSNorm
        return norm(
            size,
            epsilon=self.config.norm_eps,
            dtype=self.dtype,
            scale_metadata={"logical_axes": (axis,), "role": "scale"},
            rngs=self.rngs,
        )

    def dropout(self, x_BTD: jax.Array, keys_B: jax.Array | None) -> jax.Array:
        """Drop elements by a row's key and the position, the same on whichever device they are."""
        if keys_B is None:
            return x_BTD
        B, T, D = x_BTD.shape
        keys_BT = keys_for(keys_B, self.parallel.sequence_offset(T) + jnp.arange(T))
        # N = B T: with two axes XLA puts B last on GPUs, and transposes activations to and fro.
        drop = jax.vmap(lambda x_D, key: drop_elements(x_D, self.config.dropout, key))
        return drop(x_BTD.reshape(B * T, D), keys_BT.reshape(B * T)).reshape(x_BTD.shape)


class Linear(nnx.Module):
    """x W + b, where W, of shape (*inputs, *outputs), may be split over devices as its `axes`."""

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
        # What is added after a sum over devices is small: every device keeps it whole.
        own = tuple(axis if axis != "embed" else None for axis in axes[self.n_inputs :])
        bias = nnx.Param(jnp.zeros(outputs), logical_axes=own, role="bias")
        self.bias = nnx.data(bias if build.config.bias or use_bias else None)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.multiply(x.astype(self.dtype), self.kernel.get_value(), self.n_inputs)
        # In float32, as then its gradient is, which sums over all tokens: see `embed_tokens` in
        # transformer.py.
        return y if self.bias is None else (y + self.bias.get_value()).astype(self.dtype)


class LayerKind(NamedTuple):
    """What attention differs by between the layers of a model."""

    window: int | None  # positions that a query attends to, its own included; None is all
    rope_theta: float  # base of the rotary wavelengths
    rope_scaling: tuple[float, ...]  # as model.rope_scaling


def layer_pattern(config: ModelConfig) -> tuple[LayerKind, ...]:
    """Return the kinds of the first layers, which repeat over the depth of the model."""
    everywhere = LayerKind(None, config.rope_theta, config.rope_scaling)
    local = everywhere._replace(window=config.sliding_window)
    if config.local_rope_theta is not None:
        local = LayerKind(config.sliding_window, config.local_rope_theta, ())
    kinds = {"global": everywhere, "local": local}
    default = "local" if config.sliding_window is not None else "global"
    pattern = tuple(kinds[name] for name in config.layers or (default,))
    return pattern if len(set(pattern)) > 1 else pattern[:1]


class AttentionInputs(NamedTuple):
    """What attention needs beside the hidden states; the same for all layers of a kind."""

    attend: Attention
    at: TokenPositions
    rotation: Rotation | None  # None without model.position=rope
    window: int | None


class SelfAttention(nnx.Module):
    """Causal attention of H heads of size K, with keys and values of G heads."""

    def __init__(self, build: LayerBuilder):
        config = build.config
        D, H, G, K = config.n_embd, config.n_head, config.kv_heads, config.head_size
        self.parallel, self.n_head, self.n_kv_head = build.parallel, H, G
        # The kernels divide the scores by the square root of K.
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
        """Return q_BTHK, k_BTGK and v_BTGK of this device's heads."""
        # Not by indexing, whose gradient is a sum of arrays that are zero elsewhere.
        if self.qkv is not None:
            qkv_BTCHK = self.qkv(x_BTD)
            q_BTHK, k_BTHK, v_BTHK = (x.squeeze(2) for x in jnp.split(qkv_BTCHK, 3, axis=2))
            return q_BTHK, k_BTHK, v_BTHK
        q_BTHK = self.q(x_BTD)
        k_BTGK, v_BTGK = (x.squeeze(2) for x in jnp.split(self.kv(x_BTD), 2, axis=2))
        H, G = q_BTHK.shape[2], k_BTGK.shape[2]
        if H < self.n_head and G == self.n_kv_head:
            # `tensor` does not divide them: every device has all, and takes those of its queries.
            own_H = self.local_heads(H) * G // self.n_head
            k_BTGK, v_BTGK = jnp.take(k_BTGK, own_H, axis=2), jnp.take(v_BTGK, own_H, axis=2)
        return q_BTHK, k_BTGK, v_BTGK

    def local_heads(self, n: int) -> jax.Array:
        """Return the numbers of this device's n query heads."""
        return self.parallel.tensor_offset(n) + jnp.arange(n)


def embedding(
    n_rows: int, config: ModelConfig, rngs: nnx.Rngs, role: str, axis: str | None
) -> nnx.Embed:
    """Return a table of `n_rows`; those of a vocabulary are padded with rows of zeros."""
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
    """Return the rows of the embedding: `vocab_size` rounded up to a multiple of 128."""
    return -(-vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def keys_for(keys_B: jax.Array | None, numbers_N: jax.Array) -> jax.Array | None:
    """Return keys_BN: for every row a key of each number, the same on whichever device."""
    if keys_B is None:
        return None
    fold_in = jax.random.fold_in
    return jax.vmap(lambda key: jax.vmap(lambda n: fold_in(key, n))(numbers_N))(keys_B)
