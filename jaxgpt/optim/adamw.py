"""AdamW and the learning rate schedule, from optax."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxgpt.config import OptimizerConfig

ADAM_EPSILON = 1e-8  # PyTorch's and nanoGPT's
DECAYED = ("kernel", "embedding")  # matrices; biases and the scales of norms are not decayed


def learning_rate_schedule(config: OptimizerConfig) -> optax.Schedule:
    """Step (from 1) -> learning rate: linear warm-up to the peak, then cosine decay.

    `lr(warmup_iters)` is the peak, `lr(lr_decay_iters)` is min_lr, which then stays.
    """
    peak = config.learning_rate
    floor = peak / 10 if config.min_lr is None else config.min_lr
    cosine = optax.cosine_decay_schedule(
        peak,
        max(1, config.lr_decay_iters - config.warmup_iters),
        alpha=floor / peak if peak else 0.0,
    )
    if config.warmup_iters == 0:
        return cosine
    warmup = optax.linear_schedule(0.0, peak, config.warmup_iters)
    return optax.join_schedules([warmup, cosine], [config.warmup_iters])


def init_moments(params: Any) -> dict[str, Any]:
    """What AdamW keeps before the first step: moments `mu` and `nu`, and its `count` of updates."""
    return {
        "mu": optax.tree.zeros_like(params),
        "nu": optax.tree.zeros_like(params),
        "count": jnp.int32(0),
    }


def update_moments(config: OptimizerConfig, kept: dict[str, Any], gradients: Any) -> dict[str, Any]:
    """The same after an update with these gradients."""
    return {
        "mu": optax.tree.update_moment(gradients, kept["mu"], config.beta1, 1),
        "nu": optax.tree.update_moment(gradients, kept["nu"], config.beta2, 2),
        "count": kept["count"] + 1,
    }


def directions(config: OptimizerConfig, kept: dict[str, Any], params: Any) -> Any:
    """What AdamW (arXiv 1711.05101, algorithm 2) takes off the parameters, up to the factor lr.

    The learning rate is kept out because it depends on the step and not on how many updates
    Adam has made: a skipped step advances the one and not the other. The moments come from
    `update_moments`, so that `train_step` can leave them as they were in between.
    """
    mu_hat = optax.tree.bias_correction(kept["mu"], config.beta1, kept["count"])
    nu_hat = optax.tree.bias_correction(kept["nu"], config.beta2, kept["count"])
    return jax.tree.map(
        lambda m, v, p, decayed: (
            m / (jnp.sqrt(v) + ADAM_EPSILON) + (config.weight_decay * p if decayed else 0)
        ),
        mu_hat,
        nu_hat,
        params,
        is_decayed(params),
    )


def clip(gradients: Any, norm: jax.Array, limit: float) -> Any:
    """Gradients, scaled down to the global norm `limit` if theirs, `norm`, is above; 0 is no limit.

    What optax.clip_by_global_norm does, which would add the norm up over all devices once more.
    """
    if limit == 0:
        return gradients
    scale = jnp.where(norm < limit, 1.0, limit / norm)
    return jax.tree.map(lambda g: g * scale, gradients)


def is_decayed(params: Any) -> Any:
    """The pytree of booleans that says which parameters weight decay falls on."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in DECAYED, params)
