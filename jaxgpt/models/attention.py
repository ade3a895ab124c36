"""Causal self-attention: which kernel runs, and that of NVIDIA GPUs."""

import functools
import itertools
import math
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from jaxgpt.config import ModelConfig, UsageError
from jaxgpt.models.xla_attention import causal_attention, visible_keys, xla_attention

BLOCK = 128  # positions, of `blockwise_attention`
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
    """Return the kernel that runs, `xla` or `cudnn`, and why.

    Args:
        capability: of the devices, by `cuda_capability`.
        document_mask: data.document_mask.

    Raises:
        UsageError: if model.attention=cudnn cannot run.
    """
    K, T = config.head_size, config.block_size
    largest = 256 if capability >= 9 else 128  # of a head: Hopper's kernels take more
    obstacle = None
    if capability < 8:
        obstacle = "cuDNN attention needs an NVIDIA GPU, A100 or newer"
    elif dtype not in ("bfloat16", "float16"):
        obstacle = f"cuDNN needs train.dtype=bfloat16, not {dtype}"
    elif K % 8 or K > largest:
        obstacle = f"cuDNN needs a head size that is a multiple of 8 up to {largest}, not {K}"
    elif config.dropout:
        obstacle = f"this cuDNN path has no dropout, and model.dropout={config.dropout}"
    elif document_mask and T % 2:
        obstacle = f"cuDNN needs an even model.block_size for data.document_mask, not {T}"
    if config.attention == "cudnn" and obstacle:
        raise UsageError(f"model.attention=cudnn: {obstacle}; use auto or xla")
    if config.attention == "xla":
        return "xla", "model.attention=xla"
    if obstacle:
        return "xla", obstacle
    mask = ", and a mask of documents, 2 T^2 bytes a row" if document_mask else ""
    return "cudnn", f"flash attention, O(T) memory{mask}; bit for bit with train.deterministic=True"


def fallback_warnings(
    config: ModelConfig, kernel: str, reason: str, capability: float
) -> list[str]:
    """Return a warning where an NVIDIA GPU could have cuDNN's kernel, and this run does without."""
    if kernel == "cudnn" or config.attention != "auto" or capability < 8:
        return []
    return [f"attention runs without cuDNN, in O(T^2) memory and slower: {reason}"]


def make_attention(kernel: str, config: ModelConfig, deterministic: bool = False) -> Attention:
    """Return the attention function of a kernel that `choose_attention` named.

    Args:
        deterministic: train.deterministic.
    """
    if kernel == "cudnn":
        scales = distinct_scales(config.head_size) if deterministic else None
        return functools.partial(cudnn_attention, window=config.sliding_window, scales=scales)
    return functools.partial(causal_attention, dropout=config.dropout, window=config.sliding_window)


def distinct_scales(head_size: int) -> Iterator[float]:
    """Yield 1 / sqrt(head_size) again and again, no two alike, though alike in float32.

    Asked for deterministic kernels, XLA finds only one of several calls that are alike, such as
    those of layers (github.com/openxla/xla/pull/46500); a call with its own scale is found.
    """
    return (head_size**-0.5 * (1 + n * 2**-40) for n in itertools.count())


def cudnn_attention(
    q_BTHK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGK: jax.Array,
    keys_BH: jax.Array | None,
    starts_BT: jax.Array | None = None,
    window: int | None = None,
    scales: Iterator[float] | None = None,
) -> jax.Array:
    """Attend by cuDNN's fused flash kernel, which never holds the scores of all heads.

    For documents it takes a mask that all heads share.
    """
    del keys_BH  # choose_attention does not pick this kernel with dropout
    attend = functools.partial(
        jax.nn.dot_product_attention,
        q_BTHK,
        k_BTGK,
        v_BTGK,
        scale=None if scales is None else next(scales),
        implementation="cudnn",
    )
    if starts_BT is not None:
        positions_T = jnp.arange(q_BTHK.shape[1])
        return attend(mask=visible_keys(positions_T, positions_T, window, starts_BT))
    return attend(is_causal=True, local_window_size=None if window is None else (window - 1, 0))


def blockwise_attention(
    q_BTHK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGK: jax.Array,
    keys_BH: jax.Array | None,
    starts_BT: jax.Array | None = None,
    window: int | None = None,
) -> jax.Array:
    """Attend a block of positions after the other, in memory that grows with T and not T^2.

    It stands for cuDNN's kernel where `jaxgpt.plan` compiles without an NVIDIA GPU.
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
