"""The table of attention kernels, and the choice of a kernel."""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax

from jaxgpt.config import ModelConfig, UsageError
from jaxgpt.kernels.attention import (
    Attention,
    blockwise_attention,
    causal_attention,
    cudnn_attention,
    distinct_scales,
    without_scores,
)

# At this block size and above, `blockwise_attention` is faster on CPUs than `causal_attention`. At
# T = 1,024, 2,048 and 4,096, `blockwise_attention` takes 0.99, 0.93 and 0.62 times as long, and
# uses 1/2, 1/4 and 1/8 of the memory (November 2026, two cores of an AMD EPYC, float32, JAX
# 0.10.2).
MIN_BLOCKWISE_T = 2048
# Older versions of JAX store the gradient of cuDNN attention's mask, with shape (B, H, T, T).
MASK_VERSION = (0, 11, 2)
# Above this block size, a document mask for cuDNN takes more than 512 MiB per row, so `auto` skips
# cuDNN.
MAX_MASKED_T = 16384


def cuda_capability(device: jax.Device) -> float:
    """Return the compute capability of an NVIDIA GPU, such as 9.0. For other devices, return 0."""
    try:
        return float(getattr(device, "compute_capability", 0))
    except ValueError:  # AMD GPUs report a name, such as gfx90a
        return 0.0


class AttentionSetting(NamedTuple):
    """Settings that determine which attention kernels can run, and how they are built."""

    config: ModelConfig
    dtype: str  # train.dtype
    platform: str = "cpu"  # `jax.Device.platform` of the devices
    capability: float = 0.0  # `cuda_capability` of the devices
    document_mask: bool = False  # data.document_mask
    deterministic: bool = False  # train.deterministic


class Kernel(NamedTuple):
    """An entry of `KERNELS`, the table of attention kernels."""

    obstacle: Callable[[AttentionSetting], str | None]  # why the kernel cannot run; None if it can
    make: Callable[[AttentionSetting], Attention]
    reason: str  # the kernel's advantage, for the log line
    min_T: int = 0  # `auto` skips it below this block size, except on GPUs with a document mask
    max_masked_T: float = math.inf  # with a document mask, `auto` skips it above this block size
    stores_scores: bool = False  # whether the kernel keeps T x T scores in memory
    stand_in: Callable[[], Attention] | None = None
    """Make a kernel that needs about as much memory and that `jaxgpt.plan` can compile on a CPU.

    If None, `jaxgpt.plan` compiles this kernel."""


def _cudnn_obstacle(setting: AttentionSetting) -> str | None:
    """Return the reason why the cuDNN kernel cannot run, or None if it can."""
    config, K = setting.config, setting.config.head_size
    largest = 256 if setting.capability >= 9 else 128  # maximum; Hopper supports larger heads
    if setting.platform != "gpu" or setting.capability < 8:
        return "cuDNN attention needs an NVIDIA GPU, A100 or newer"
    if setting.dtype not in ("bfloat16", "float16"):
        return f"cuDNN needs train.dtype=bfloat16, not {setting.dtype}"
    if K % 8 or K > largest:
        return f"cuDNN needs a head size that is a multiple of 8 up to {largest}, not {K}"
    if config.dropout:
        return f"the cuDNN kernel does not support dropout, and model.dropout={config.dropout}"
    if setting.document_mask and config.block_size % 2:
        return (
            f"cuDNN needs an even model.block_size for data.document_mask, not {config.block_size}"
        )
    if setting.document_mask and jax.__version_info__ < MASK_VERSION:
        oldest = ".".join(map(str, MASK_VERSION))
        return (
            f"cuDNN needs JAX {oldest} or newer for data.document_mask, because JAX "
            f"{jax.__version__} would store T x T gradients of the mask for each row and head"
        )
    return None


def _make_cudnn(setting: AttentionSetting) -> Attention:
    """Return the cuDNN kernel, with `distinct_scales` if train.deterministic=True."""
    scales = distinct_scales(setting.config.head_size) if setting.deterministic else None
    return functools.partial(cudnn_attention, scales=scales)


# model.attention -> kernel. `auto` picks the first kernel that can run and is allowed for the block
# size.
KERNELS = {
    "cudnn": Kernel(
        _cudnn_obstacle,
        _make_cudnn,
        "flash attention, O(T) memory; bitwise reproducible with train.deterministic=True",
        max_masked_T=MAX_MASKED_T,
        stand_in=lambda: without_scores(blockwise_attention),
    ),
    "blockwise": Kernel(
        lambda setting: None,
        lambda setting: functools.partial(blockwise_attention, dropout=setting.config.dropout),
        "one block of queries at a time, O(T) memory",
        min_T=MIN_BLOCKWISE_T,
    ),
    "xla": Kernel(
        lambda setting: None,
        lambda setting: functools.partial(causal_attention, dropout=setting.config.dropout),
        "all scores at once, O(T^2) memory",
        stores_scores=True,
    ),
}


def choose_attention(setting: AttentionSetting) -> tuple[str, str]:
    """Return the name of the kernel to run, and the reason for the choice.

    Ring attention uses its own kernel instead. Raises `UsageError` if model.attention names a
    kernel that is unknown or cannot run.
    """
    chosen = setting.config.attention
    if chosen != "auto":
        if obstacle := _kernel(chosen).obstacle(setting):
            raise UsageError(f"model.attention={chosen}: {obstacle}; use auto")
        return chosen, f"model.attention={chosen}"
    name, names = _first_kernel(setting), list(KERNELS)
    before = [KERNELS[other].obstacle(setting) for other in names[: names.index(name)]]
    obstacles = [why for why in before if why is not None]
    mask = "a document mask of 2 T^2 bytes per row" if setting.document_mask else ""
    reason = KERNELS[name].reason
    if mask and name == "cudnn":
        reason += f", plus {mask}"
    elif mask and KERNELS["cudnn"].obstacle(setting) is None:
        obstacles.append(f"cuDNN would need {mask}; model.attention=cudnn selects it")
    return name, "; ".join([reason, *obstacles])


def _kernel(name: str) -> Kernel:
    if name not in KERNELS:
        raise UsageError(f"model.attention={name}: must be one of auto, {', '.join(KERNELS)}")
    return KERNELS[name]


def _first_kernel(setting: AttentionSetting) -> str:
    T, is_masked = setting.config.block_size, setting.document_mask

    def suits(kernel: Kernel) -> bool:
        # On GPUs, `xla` stores the scores of all layers; see models/README.md.
        is_long = T >= kernel.min_T or (is_masked and setting.platform == "gpu")
        return is_long and (not is_masked or T <= kernel.max_masked_T)

    return next(
        name
        for name, kernel in KERNELS.items()
        if kernel.obstacle(setting) is None and suits(kernel)
    )


def stores_scores(config: ModelConfig) -> bool:
    """Return `Kernel.stores_scores` for the kernel selected by model.attention.

    For model.attention=auto, this assumes a CPU and no document mask. Raises `UsageError` if
    model.attention names an unknown kernel.
    """
    name = config.attention
    if name == "auto":
        name = _first_kernel(AttentionSetting(config, "float32"))
    return _kernel(name).stores_scores


def fallback_warnings(setting: AttentionSetting, kernel: str, reason: str) -> list[str]:
    """Return a warning if `auto` chooses a slower kernel on a GPU that supports cuDNN attention.

    The kernels after `cudnn` in `KERNELS` are slower. `choose_attention` returns `kernel` and
    `reason`.

    Returns:
        A list with the warning, or an empty list.
    """
    names = list(KERNELS)
    is_as_fast = names.index(kernel) <= names.index("cudnn")
    if is_as_fast or setting.config.attention != "auto" or setting.capability < 8:
        return []
    return [f"attention runs without cuDNN, which is slower: {reason}"]
