"""Learning-rate schedules: pure functions of the step."""

import jax
import jax.numpy as jnp
import optax

from jaxgpt.config import OptimizerConfig


def learning_rate_schedule(config: OptimizerConfig) -> optax.Schedule:
    """Return the schedule step (from 1) -> learning rate: linear warm-up, then as `schedule` says.

    `lr(warmup_iters)` is the peak. With cosine and wsd, `lr(lr_decay_iters)` is min_lr, and so is
    every later one.
    """
    after = _AFTER_WARMUP[config.schedule](config)
    if config.warmup_iters == 0:
        return after
    warmup = optax.linear_schedule(0.0, config.learning_rate, config.warmup_iters)
    return optax.join_schedules([warmup, after], [config.warmup_iters])


# Schedules that count from the end of warm-up.


def _cosine(config: OptimizerConfig) -> optax.Schedule:
    peak = config.learning_rate
    return optax.cosine_decay_schedule(
        peak,
        max(1, config.lr_decay_iters - config.warmup_iters),
        alpha=_floor(config) / peak if peak else 0.0,
    )


def _warmup_stable_decay(config: OptimizerConfig) -> optax.Schedule:
    """Return the peak, then min_lr + (peak - min_lr) (1 - x), or 1 - sqrt(x), x in [0, 1]."""
    peak, floor = config.learning_rate, _floor(config)
    start, n = config.wsd_decay_start - config.warmup_iters, config.wsd_decay_length

    def schedule(step: jax.Array | int) -> jax.Array:
        x = jnp.clip((step - start) / n, 0.0, 1.0)
        x = jnp.sqrt(x) if config.wsd_decay == "sqrt" else x
        return peak * (1.0 - x) + floor * x

    return schedule


def _constant(config: OptimizerConfig) -> optax.Schedule:
    return optax.constant_schedule(config.learning_rate)


_AFTER_WARMUP = {"cosine": _cosine, "wsd": _warmup_stable_decay, "constant": _constant}


def _floor(config: OptimizerConfig) -> float:
    return config.learning_rate / 10 if config.min_lr is None else config.min_lr
