"""Matmul of activations and weights in FP8 (8-bit floating point), for train.matmul_dtype=float8.

Each tensor has one scale. Activations and weights are rounded to E4M3, and gradients to E5M2 (arXiv
2209.05433), which has a larger range but a shorter mantissa.

A matmul is written as `_dequantize(a) @ _dequantize(b)`. On GPUs with FP8, XLA replaces this with
cublasLt's FP8 matmul. Other devices emulate FP8 by computing the expression as written. The results
differ only in the order and the precision of the summation.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxgpt.config import UsageError
from jaxgpt.kernels.linear import matmul_gradients

MIN_CAPABILITY = 8.9  # CUDA compute capability of the first GPUs with FP8 (Ada)
# For gradients, cublasLt must not use its fast accumulation, which has fewer bits.
_EXACT_SUMS = jax.lax.Precision.HIGHEST


class Quantized(NamedTuple):
    """A tensor in FP8: `values * scale`."""

    values: jax.Array
    scale: jax.Array  # a power of two: float32 scalar


def quantize(x: jax.Array, dtype: jnp.dtype) -> Quantized:
    """Scale x by a power of two, and round the result to FP8.

    x is a non-empty float32 or bfloat16 array. The power is the largest that keeps m = max(largest
    absolute value, 1e-30) in the range of `dtype`. Scaling by a power of two adds no rounding
    error, unless elements become subnormal or 0. In E4M3, this affects only elements below
    m / 14,000.

    Inside `shard_map`, each device scales its own part of x, so no communication is needed.
    Partial products are rescaled before they are summed over devices.

    If x contains NaN or infinity, all elements of a product with x are NaN.
    """
    largest = jnp.maximum(jnp.abs(x).max().astype(jnp.float32), 1e-30)
    factor = float(jnp.finfo(dtype).max) / largest
    exponent = jax.lax.bitcast_convert_type(factor, jnp.int32) & 0x7F800000  # drop the mantissa
    factor = jax.lax.bitcast_convert_type(exponent, jnp.float32)
    return Quantized((x * factor.astype(x.dtype)).astype(dtype), 1 / factor)


def _dequantize(x: Quantized, dtype: jnp.dtype) -> jax.Array:
    return x.values.astype(dtype) * x.scale.astype(dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def float8_matmul(x: jax.Array, w: jax.Array, n: int) -> jax.Array:
    """Return x W with both operands in FP8, contracted as in `kernels.linear.matmul`.

    x, W and the result have the same dtype, float32 or bfloat16. Only the `Quantized` x and W are
    kept for the backward pass, which also multiplies in FP8.
    """
    return _forward(x, w, n)[0]


def _forward(x: jax.Array, w: jax.Array, n: int) -> tuple[jax.Array, tuple[Quantized, Quantized]]:
    kept = quantize(x, jnp.float8_e4m3fn), quantize(w, jnp.float8_e4m3fn)
    return jnp.tensordot(*(_dequantize(one, x.dtype) for one in kept), n), kept


def _backward(
    n: int, kept: tuple[Quantized, Quantized], dy: jax.Array
) -> tuple[jax.Array, jax.Array]:
    dtype = dy.dtype
    x, w, dy = (_dequantize(one, dtype) for one in (*kept, quantize(dy, jnp.float8_e5m2)))
    return matmul_gradients(x, w, dy, n, _EXACT_SUMS)


float8_matmul.defvjp(_forward, _backward)


def float8_warnings(platform: str, capability: float) -> tuple[str, ...]:
    """Return a warning if the devices emulate FP8; otherwise, an empty tuple.

    Args:
        platform: `jax.Device.platform` of the devices.
        capability: CUDA compute capability of the devices; 0 if they are not NVIDIA GPUs.

    Raises:
        UsageError: if the platform is `gpu` but the devices are not NVIDIA GPUs with FP8.
    """
    if platform != "gpu":
        return ("train.matmul_dtype=float8 is emulated on these devices, which makes steps slower",)
    if capability < MIN_CAPABILITY:
        raise UsageError(
            "train.matmul_dtype=float8: needs NVIDIA GPUs of compute capability "
            f"{MIN_CAPABILITY} or more, such as an H100; leave it out"
        )
    return ()
