"""Learning-rate schedules: pure functions of the step."""

import optax

from jaxgpt.config import OptimizerConfig


def learning_rate_schedule(config: OptimizerConfig) -> optax.Schedule:
    """Return the schedule step (from 1) -> learning rate: linear warm-up, then cosine decay.

    `lr(warmup_iters)` is the peak, `lr(lr_decay_iters)` is min_lr, and so is every later one.
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
