import types

import pytest

from jaxgpt.config import ModelConfig, UsageError
from jaxgpt.models.attention import (
    AttentionSetting,
    choose_attention,
    cuda_capability,
    fallback_warnings,
)

GPU_MODEL = ModelConfig(n_head=12, n_embd=768)


@pytest.mark.parametrize(
    ("config", "dtype", "capability", "kernel", "reason"),
    [
        (GPU_MODEL, "bfloat16", 9.0, "cudnn", "flash"),
        (GPU_MODEL, "bfloat16", 8.0, "cudnn", "flash"),
        (GPU_MODEL, "bfloat16", 7.0, "xla", "A100 or newer"),  # V100
        (GPU_MODEL, "bfloat16", 0.0, "xla", "NVIDIA"),  # CPU, AMD
        (GPU_MODEL, "float32", 9.0, "xla", "bfloat16"),
        (ModelConfig(n_head=1, n_embd=132), "bfloat16", 9.0, "xla", "head size"),
        (ModelConfig(n_head=2, n_embd=320), "bfloat16", 9.0, "cudnn", "flash"),  # 160 each
        (ModelConfig(n_head=2, n_embd=320), "bfloat16", 8.0, "xla", "8 up to 128, not 160"),
        (ModelConfig(n_head=1, n_embd=264), "bfloat16", 9.0, "xla", "8 up to 256, not 264"),
        (ModelConfig(dropout=0.1), "bfloat16", 9.0, "xla", "dropout"),
        (ModelConfig(attention="xla"), "bfloat16", 9.0, "xla", "model.attention=xla"),
    ],
)
def test_the_kernel_is_chosen_and_the_choice_explained(config, dtype, capability, kernel, reason):
    chosen, why = choose_attention(AttentionSetting(config, dtype, "gpu", capability))
    assert chosen == kernel
    assert reason in why


@pytest.mark.parametrize(
    ("config", "capability", "n_warnings"),
    [
        (ModelConfig(dropout=0.1), 9.0, 1),
        (ModelConfig(dropout=0.1, attention="xla"), 9.0, 0),  # as asked for
        (ModelConfig(dropout=0.1), 7.0, 0),  # could not have it in any case
        (GPU_MODEL, 9.0, 0),  # has it
    ],
)
def test_a_gpu_that_does_without_cudnn_is_a_warning(config, capability, n_warnings):
    setting = AttentionSetting(config, "bfloat16", "gpu", capability)
    warnings = fallback_warnings(setting, *choose_attention(setting))
    assert len(warnings) == n_warnings and all("dropout" in warning for warning in warnings)


def test_asking_for_cudnn_without_a_gpu_is_refused():
    with pytest.raises(UsageError, match="model.attention=cudnn: .*use auto"):
        choose_attention(AttentionSetting(ModelConfig(attention="cudnn"), "bfloat16"))


@pytest.mark.parametrize(("told", "expected"), [("9.0", 9.0), ("gfx90a", 0.0), (None, 0.0)])
def test_only_nvidias_devices_have_a_cuda_capability(told, expected):
    device = types.SimpleNamespace(**({} if told is None else {"compute_capability": told}))
    assert cuda_capability(device) == expected
