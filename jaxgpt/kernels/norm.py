"""LayerNorm and RMSNorm with hand-written gradients, which save up to 7% of step time on CPUs."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


class LayerNorm(nnx.LayerNorm):
    """`nnx.LayerNorm` (arXiv 1607.06450) over the last axis: x_BTD -> y_BTD in `dtype`.

    If `dtype` is None, y is float32, even if x and the parameters are bfloat16 (unlike in Flax). In
    float32, the output agrees with Flax's. In bfloat16, the output is more accurate, because Flax
    rounds the scale and the bias first. Supports dtype, epsilon and use_bias, but no other option
    that changes the computation.
    """

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        y_BTD = normalized(x_BTD, self.scale.get_value(), self.epsilon, True)
        if self.bias is not None:
            y_BTD = y_BTD + self.bias.get_value()
        return y_BTD.astype(self.dtype)


class RMSNorm(nnx.RMSNorm):
    """`nnx.RMSNorm` (arXiv 1910.07467) over the last axis: x_BTD -> y_BTD in `dtype`.

    If `dtype` is None, y is float32. See `LayerNorm` for the other differences from Flax.
    """

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        y_BTD = normalized(x_BTD, self.scale.get_value(), self.epsilon, False)
        return y_BTD.astype(self.dtype)


class RMSNorm1p(RMSNorm):
    """RMSNorm that multiplies by 1 + scale, where scale is initially 0 (Gemma, arXiv 2408.00118).

    `options` are the options of `RMSNorm` except scale_init.
    """

    def __init__(self, num_features: int, **options: Any):
        super().__init__(num_features, scale_init=nnx.initializers.zeros_init(), **options)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        y_BTD = normalized(x_BTD, 1 + self.scale.get_value(), self.epsilon, False)
        return y_BTD.astype(self.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def normalized(x_BTD: jax.Array, scale_D: jax.Array, epsilon: float, centered: bool) -> jax.Array:
    """Return (x - mean) / sqrt(variance + epsilon) * scale, as a float32 array with x's shape.

    Mean and variance are computed over the last axis. If `centered` is False, the mean is replaced
    by 0, and the variance by the mean of x^2. `scale_D` is float32.

    For the backward pass, this keeps x in its own dtype, the scale, and two numbers per token.
    JAX's own gradient would keep several float32 arrays of x's shape. Inside `shard_map`, the scale
    must be marked as varying along the same mesh axes as x. `parallel.zero.local_params` does this.
    """
    return _forward(x_BTD, scale_D, epsilon, centered)[0]


def _forward(
    x_BTD: jax.Array, scale_D: jax.Array, epsilon: float, centered: bool
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    x = x_BTD.astype(jnp.float32)
    if not centered:
        r_BT1 = jax.lax.rsqrt(jnp.square(x).mean(axis=-1, keepdims=True) + epsilon)
        return x * (r_BT1 * scale_D), (x_BTD, jnp.zeros_like(r_BT1), r_BT1, scale_D)
    mean_BT1 = x.mean(axis=-1, keepdims=True)
    variance_BT1 = jnp.square(x).mean(axis=-1, keepdims=True) - jnp.square(mean_BT1)
    r_BT1 = jax.lax.rsqrt(jnp.maximum(0, variance_BT1) + epsilon)
    return (x - mean_BT1) * (r_BT1 * scale_D), (x_BTD, mean_BT1, r_BT1, scale_D)


def _backward(
    epsilon: float, centered: bool, kept: tuple[jax.Array, ...], dy_BTD: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return dx = r (g - mean(g) - z mean(g z)) and dscale = sum(dy z).

    Here g = dy scale and z = (x - mean) r. Without centering, mean and mean(g) are 0.
    """
    x_BTD, mean_BT1, r_BT1, scale_D = kept
    D = x_BTD.shape[-1]
    z_BTD = (x_BTD.astype(jnp.float32) - mean_BT1) * r_BT1
    dyz_BTD = dy_BTD * z_BTD
    mean_g_BT1 = _dot(dy_BTD, scale_D) / D if centered else 0.0
    mean_gz_BT1 = _dot(dyz_BTD, scale_D) / D
    dx_BTD = r_BT1 * (dy_BTD * scale_D - mean_g_BT1 - z_BTD * mean_gz_BT1)
    return dx_BTD.astype(x_BTD.dtype), dyz_BTD.sum(axis=tuple(range(x_BTD.ndim - 1)))


def _dot(a_BTD: jax.Array, scale_D: jax.Array) -> jax.Array:
    """Return sum(a scale) over the last axis, with shape (B, T, 1).

    On CPUs, a matrix-vector product saves 4% of the step time compared with a sum. On GPUs, XLA
    fuses the sum.
    """

    def total(a_BTD: jax.Array, scale_D: jax.Array) -> jax.Array:
        return (a_BTD * scale_D).sum(axis=-1)

    sums_BT = jax.lax.platform_dependent(a_BTD, scale_D, cpu=jnp.matmul, default=total)
    return sums_BT[..., None]


normalized.defvjp(_forward, _backward)
