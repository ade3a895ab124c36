"""Measure the errors of this device's attention kernels: `python -m jaxgpt.doctor.prove.attention`.

The output is one JSON object that maps each case to the result of `attention_errors`.
"""

import json
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.config import load_config
from jaxgpt.kernels.attention import TokenPositions
from jaxgpt.models.attention import (
    KERNELS,
    AttentionSetting,
    choose_attention,
    cuda_capability,
)

CASES = {  # name of the case -> settings that override the gpt2 preset
    "attention": (),
    "attention with dropout 0.2": ("model.dropout=0.2",),
    "attention within documents": ("data.document_mask=True",),
    "grouped-query attention in a window": ("model.n_kv_head=4", "model.sliding_window=200"),
}
DOCUMENT = 100  # tokens per document


def attention_errors(settings: Sequence[str]) -> tuple[float, float, str]:
    """Compare the kernel that `choose_attention` returns for bfloat16 with float32 XLA attention.

    Returns the output error, the largest gradient error, and the kernel's name with the reason why
    it was chosen. An error is the largest absolute difference from the float32 result, divided by
    that result's largest absolute value. `settings` override the gpt2 preset, but must keep its 12
    heads of size 64. With dropout, the kernel must be `xla`, because other kernels may draw
    different masks. The inputs have shape (2, T, heads, 64), where T is 256 on a CPU and otherwise
    1024. A NaN in a result makes its error NaN. Raises `UsageError` if a setting is invalid, or if
    the kernel that model.attention selects cannot run.
    """
    T = 256 if jax.default_backend() == "cpu" else 1024
    config = load_config("gpt2", *settings)
    model, documents = config.model, config.data.document_mask
    groups = model.n_kv_head or model.n_head
    heads = (model.n_head, groups, groups, model.n_head)  # of q, k, v and the output gradient
    keys = jax.random.split(jax.random.key(0), 4)
    narrow = [
        jax.random.normal(key, (2, T, n, 64), jnp.bfloat16)
        for key, n in zip(keys, heads, strict=True)
    ]
    wide = [x.astype(jnp.float32) for x in narrow]
    device = jax.devices()[0]
    setting = AttentionSetting(
        model, "bfloat16", device.platform, cuda_capability(device), documents
    )
    kernel, why = choose_attention(setting)
    dropped = jax.random.split(jax.random.key(1), (2, 12)) if model.dropout else None
    positions_T = jnp.arange(T)
    at, window = TokenPositions(positions_T), model.sliding_window
    if documents:
        segments_BT = jnp.broadcast_to(positions_T // DOCUMENT, (2, T))
        at = TokenPositions(positions_T % DOCUMENT + jnp.zeros_like(segments_BT), segments_BT)

    def output_and_gradients(kernel: str, arrays: list[Any]) -> list[Any]:
        attend = KERNELS[kernel].make(setting)

        @jax.jit
        def compute(q, k, v, d):
            out, pull = jax.vjp(lambda *qkv: attend(*qkv, at, at, window, dropped), q, k, v)
            return [out, *pull(d)]

        return compute(*arrays)

    found = output_and_gradients(kernel, narrow)
    with jax.default_matmul_precision("highest"):
        exact = output_and_gradients("xla", wide)
    forward, *gradients = map(_relative_error, found, exact)
    return forward, float(np.max(gradients)), f"{kernel}: {why}"


def _relative_error(found: jax.Array, exact: jax.Array) -> float:
    a, b = np.asarray(found, np.float32), np.asarray(exact)  # on CPUs, XLA's max can ignore NaN
    return float(np.abs(a - b).max() / np.abs(b).max())


if __name__ == "__main__":
    print(json.dumps({name: attention_errors(words) for name, words in CASES.items()}))
