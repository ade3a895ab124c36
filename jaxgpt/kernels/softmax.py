"""The two reductions of a softmax, in one pass over the data on GPUs.

With two passes, a step of `gpt2` on an H100 moves 3% more bytes.
"""

import jax
import jax.numpy as jnp


def max_and_sum_exp(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return m = max(x) and sum(exp(x - m)) over the last axis of x.

    x must be float32, shape (..., V). The results are float32, shape (...). Do not differentiate
    this function. If the maximum is infinite, the sum is unspecified.
    """
    return jax.lax.platform_dependent(x, cpu=_in_two_passes, default=_in_one_pass)


def _in_two_passes(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    largest = x.max(axis=-1)
    return largest, jnp.exp(x - largest[..., None]).sum(axis=-1)


def _in_one_pass(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Reduce x by merging the (maximum, sum) pairs of its parts (arXiv 1805.02867, section 3.1)."""

    def merge(
        a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        low, high = jnp.minimum(a[0], b[0]), jnp.maximum(a[0], b[0])
        factor = jnp.exp(jnp.where(low == high, 0.0, low - high))  # 1 even if both are -inf
        a_is_high = a[0] >= b[0]
        of_high, of_low = jnp.where(a_is_high, a[1], b[1]), jnp.where(a_is_high, b[1], a[1])
        return high, of_high + of_low * factor

    none = jnp.array(-jnp.inf, x.dtype), jnp.array(0, x.dtype)
    return jax.lax.reduce((x, jnp.ones_like(x)), none, merge, (x.ndim - 1,))
