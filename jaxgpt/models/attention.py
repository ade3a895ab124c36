"""Causal self-attention: which kernel runs, and flash kernels of GPUs."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxgpt.config import ModelConfig, UsageError
from jaxgpt.models.xla_attention import causal_attention, repeat_heads, xla_attention

BLOCK = 128  # positions, of `blockwise_attention` and of Pallas's kernel
# (q_BTHK, k_BTGK, v_BTGK, dropout keys_BH or None, starts_BT or None) -> out_BTHK. Head h reads
# the keys and values of head h G // H. starts_BT, with data.document_mask, has the position where
# each token's document begins: what is before is not attended to.
Attention = Callable[
    [jax.Array, jax.Array, jax.Array, jax.Array | None, jax.Array | None], jax.Array
]


def cuda_capability(device: jax.Device) -> float:
    """Return the compute capability of an NVIDIA GPU, such as 9.0; 0 of any other device."""
    try:
        return float(getattr(device, "compute_capability", 0))
    except ValueError:  # AMD's are words: gfx90a
        return 0.0


def choose_attention(
    config: ModelConfig, dtype: str, capability: float, document_mask: bool = False
) -> tuple[str, str]:
    """Return the kernel that runs (xla, cudnn or pallas), and why.

    Args:
        capability: of the devices, by `cuda_capability`.
        document_mask: data.document_mask.

    Raises:
        UsageError: if the kernel that model.attention names cannot run.
    """
    flash = "pallas" if document_mask else "cudnn"
    if config.attention == "xla":
        return "xla", "model.attention=xla"
    if config.attention not in ("auto", flash):
        other = "cudnn" if flash == "pallas" else "pallas"
        wants = "has no documents" if other == "cudnn" else "is for data.document_mask=True"
        raise UsageError(f"model.attention={other}: {wants}; use auto, {flash} or xla")
    obstacle = _obstacle(config, flash, dtype, capability)
    if config.attention == flash and obstacle:
        raise UsageError(f"model.attention={flash}: {obstacle}; use auto or xla")
    return ("xla", obstacle) if obstacle else (flash, "flash attention, O(T) memory")


def _obstacle(config: ModelConfig, flash: str, dtype: str, capability: float) -> str | None:
    """Return why a flash kernel cannot run; None if it can."""
    K, T = config.head_size, config.block_size
    name = {"cudnn": "cuDNN", "pallas": "Pallas's kernel"}[flash]
    # Hopper's kernels of cuDNN take larger heads.
    largest = 256 if capability >= 9 and flash == "cudnn" else 128
    if capability < 8:
        return f"{name} needs an NVIDIA GPU, A100 or newer"
    if dtype not in ("bfloat16", "float16"):
        return f"{name} needs train.dtype=bfloat16, not {dtype}"
    if K % 8 or K > largest:
        return f"{name} needs a head size that is a multiple of 8 up to {largest}, not {K}"
    if config.dropout:
        return f"{name} has no dropout here, and model.dropout={config.dropout}"
    if flash == "pallas" and T % BLOCK:
        return f"{name} needs model.block_size to be a multiple of {BLOCK}, not {T}"
    if flash == "pallas" and config.sliding_window:
        return f"{name} has no model.sliding_window={config.sliding_window}"
    return None


def fallback_warnings(
    config: ModelConfig, kernel: str, reason: str, capability: float
) -> list[str]:
    """Return a warning where an NVIDIA GPU could have a flash kernel, and this run does without."""
    if kernel != "xla" or config.attention != "auto" or capability < 8:
        return []
    return [f"attention runs without a flash kernel, in O(T^2) memory and slower: {reason}"]


def make_attention(kernel: str, config: ModelConfig) -> Attention:
    """Return the attention function of a kernel that `choose_attention` named."""
    if kernel == "pallas":
        return pallas_attention
    if kernel == "cudnn":
        return functools.partial(cudnn_attention, window=config.sliding_window)
    return functools.partial(causal_attention, dropout=config.dropout, window=config.sliding_window)


def cudnn_attention(
    q_BTHK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGK: jax.Array,
    keys_BH: jax.Array | None,
    starts_BT: jax.Array | None = None,
    window: int | None = None,
) -> jax.Array:
    """Attend by cuDNN's fused flash kernel, which never holds the T x T scores."""
    del keys_BH, starts_BT  # choose_attention does not pick this kernel with dropout or documents
    return jax.nn.dot_product_attention(
        q_BTHK,
        k_BTGK,
        v_BTGK,
        is_causal=True,
        local_window_size=None if window is None else (window - 1, 0),
        implementation="cudnn",
    )


def pallas_attention(
    q_BTHK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGK: jax.Array,
    keys_BH: jax.Array | None,
    starts_BT: jax.Array | None,
    interpret: bool = False,
) -> jax.Array:
    """Attend by JAX's flash kernel in Pallas, whose segments are the documents of a row.

    `interpret` computes it on a CPU, for tests.
    """
    from jax.experimental.pallas.ops.gpu.attention import mha  # half a second of imports

    del keys_BH  # choose_attention does not pick this kernel with dropout
    H, K = q_BTHK.shape[2:]
    k_BTHK, v_BTHK = repeat_heads(k_BTGK, H), repeat_heads(v_BTGK, H)
    return mha(
        q_BTHK, k_BTHK, v_BTHK, starts_BT, sm_scale=K**-0.5, causal=True, interpret=interpret
    )


def blockwise_attention(
    q_BTHK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGK: jax.Array,
    keys_BH: jax.Array | None,
    starts_BT: jax.Array | None = None,
    window: int | None = None,
) -> jax.Array:
    """Attend a block of positions after the other, in memory that grows with T and not T^2.

    It stands for a flash kernel where `jaxgpt.plan` compiles without an NVIDIA GPU.
    """
    del keys_BH
    B, T, H, K = q_BTHK.shape
    size = math.gcd(T, BLOCK)
    starts_BT = jnp.zeros((B, T), jnp.int32) if starts_BT is None else starts_BT

    @jax.checkpoint
    def attend(_, block):
        q_BtHK, starts_Bt, offset = block
        return None, xla_attention(
            q_BtHK, k_BTGK, v_BTGK, None, starts_Bt, window=window, position_offset=offset
        )

    def blocks(x: jax.Array) -> jax.Array:
        return x.reshape(B, T // size, size, *x.shape[2:]).swapaxes(0, 1)

    operands = blocks(q_BTHK), blocks(starts_BT), jnp.arange(0, T, size)
    _, out = jax.lax.scan(attend, None, operands)
    return out.swapaxes(0, 1).reshape(B, T, H, K)


def without_scores(attend: Attention) -> Attention:
    """Return attention that computes its T x T scores again for the backward pass.

    The selective recomputation of arXiv 2205.05198, section 5.
    """

    @jax.custom_vjp
    def forgetful(q_BTHK, k_BTGK, v_BTGK, keys_BH, starts_BT):
        return attend(q_BTHK, k_BTGK, v_BTGK, keys_BH, starts_BT)

    def forward(*operands):
        return attend(*operands), operands

    def backward(operands, d_out_BTHK):
        # The barrier keeps XLA from computing the scores before their turn, and keeping them.
        operands, d_out_BTHK = jax.lax.optimization_barrier((operands, d_out_BTHK))
        *qkv, keys_BH, starts_BT = operands
        d_qkv = jax.vjp(lambda *qkv: attend(*qkv, keys_BH, starts_BT), *qkv)[1](d_out_BTHK)
        return *d_qkv, None, None

    forgetful.defvjp(forward, backward)
    return forgetful
