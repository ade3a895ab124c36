"""Learning-rate schedules. The host computes them in float64."""

import math

import numpy as np

from jaxgpt.config import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int) -> np.float32:
    """Return the learning rate at a step: a linear warm-up, then `schedule`.

    Steps are counted from 1. The warm-up reaches the peak, `learning_rate`, at step `warmup_iters`.
    Without a warm-up, the schedule begins at step 0. The cosine, linear and wsd schedules end at
    step max(`lr_decay_iters`, `warmup_iters` + 1), and the learning rate then stays at `min_lr` (by
    default, a tenth of the peak). The constant schedule stays at the peak. The float32 result is
    within one ulp of the exact value. It is computed on the host, so that the log shows the same
    value whether or not the step is skipped.
    """
    peak = config.learning_rate
    floor = peak / 10 if config.min_lr is None else config.min_lr
    if step < config.warmup_iters:
        return np.float32(peak * step / config.warmup_iters)
    height = _HEIGHTS[config.schedule](config, step)
    return np.float32(peak * height + floor * (1 - height))


# For a step after the warm-up, each schedule returns a number between 1 (peak learning rate) and 0
# (floor). This number is computed from the remaining steps, because 1 + cos(pi x) and 1 - sqrt(x)
# suffer from cancellation near x = 1.


def _cosine(config: OptimizerConfig, step: int) -> float:
    """Return (1 + cos(pi x)) / 2 = sin^2(pi (1 - x) / 2) for x from 0 to 1."""
    return math.sin(math.pi / 2 * _linear(config, step)) ** 2


def _linear(config: OptimizerConfig, step: int) -> float:
    length = max(1, config.lr_decay_iters - config.warmup_iters)
    return _left(step, config.warmup_iters + length, length)


def _warmup_stable_decay(config: OptimizerConfig, step: int) -> float:
    """Return 1 - x, or 1 - sqrt(x) = (1 - x) / (1 + sqrt(x)), for x from 0 to 1."""
    left = _left(step, config.lr_decay_iters, config.wsd_decay_length)
    return left / (1 + math.sqrt(1 - left)) if config.wsd_decay == "sqrt" else left


def _constant(config: OptimizerConfig, step: int) -> float:
    return 1.0


def _left(step: int, end: int, length: int) -> float:
    """Return the remaining fraction of a decay that takes `length` steps and ends at step `end`."""
    return min(max(end - step, 0), length) / length


_HEIGHTS = {
    "cosine": _cosine,
    "linear": _linear,
    "wsd": _warmup_stable_decay,
    "constant": _constant,
}
