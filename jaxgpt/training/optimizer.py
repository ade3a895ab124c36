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


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """AdamW (arXiv 1711.05101) up to the factor -lr, which `train_step` applies.

    The learning rate is kept out because it depends on the step and not on how many updates
    Adam has made: a skipped step advances the one and not the other.
    """
    return optax.chain(
        optax.scale_by_adam(config.beta1, config.beta2, ADAM_EPSILON),
        optax.add_decayed_weights(config.weight_decay, is_decayed),
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
