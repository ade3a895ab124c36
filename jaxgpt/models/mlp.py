"""The kinds of MLP: what `model.mlp` may name."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from jaxgpt.config import UsageError
from jaxgpt.kernels.gelu import gelu, gelu_tanh
from jaxgpt.models.layers import MLP, LayerBuilder


class SwiGLU(nnx.Module):
    """down(silu(gate(x)) * up(x)) (arXiv 2002.05202), gate and up in one product."""

    def __init__(self, build: LayerBuilder):
        D, F = build.config.n_embd, build.config.mlp_width
        self.gate_up = build.column_parallel((D,), (2, F), ("embed", "parts", "mlp"))
        self.down = build.row_parallel((F,), (D,), ("mlp", "embed"))

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        gate_BTF, up_BTF = (x.squeeze(2) for x in jnp.split(self.gate_up(x_BTD), 2, axis=2))
        gate_BTF = jax.nn.silu(gate_BTF.astype(jnp.float32))  # as GELU, rounded once
        return self.down((gate_BTF * up_BTF).astype(up_BTF.dtype))


def squared_relu(x: jax.Array) -> jax.Array:
    """Return max(0, x)^2, elementwise (arXiv 2109.08668, section 3)."""
    return jnp.square(jax.nn.relu(x))


# model.mlp: LayerBuilder -> a module x_BTD -> y_BTD.
MLPS: dict[str, Callable[[LayerBuilder], nnx.Module]] = {
    "gelu": functools.partial(MLP, gelu),
    "gelu_tanh": functools.partial(MLP, gelu_tanh),
    "relu2": functools.partial(MLP, squared_relu),
    "swiglu": SwiGLU,
}


def make_mlp(build: LayerBuilder) -> nnx.Module:
    """Return the MLP that `model.mlp` asks for; `UsageError` if there is none of that name."""
    name = build.config.mlp
    if name not in MLPS:
        raise UsageError(f"model.mlp={name}: must be one of {', '.join(MLPS)}")
    return MLPS[name](build)
