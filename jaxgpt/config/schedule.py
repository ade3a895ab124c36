"""The steps at which a run evaluates, skips a batch or profiles. Steps are counted from 1."""

import re

from jaxgpt.config.errors import UsageError
from jaxgpt.config.schema import Config


def should_run_every(step: int, interval: int) -> bool:
    """Return whether `step` is a multiple of `interval`; False if the interval is 0."""
    return interval > 0 and step % interval == 0


def should_evaluate(config: Config, step: int) -> bool:
    """Return whether a run evaluates after this step.

    A run evaluates every train.eval_interval steps (0 disables this) and after step
    train.max_iters. The evaluation before the first step, stops and restarts are not considered.
    """
    train = config.train
    return step == train.max_iters or should_run_every(step, train.eval_interval)


def skip_ranges(config: Config) -> tuple[tuple[int, int], ...]:
    """Return `train_range_to_skip` as inclusive (first, last) pairs of steps.

    Raises `UsageError` if the setting is malformed.
    """
    return step_ranges("train_range_to_skip", config.train_range_to_skip)


def step_ranges(key: str, steps: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Return `steps`, the value of the setting `key`, as inclusive (first, last) pairs.

    Raises `UsageError` if the number of steps is odd, or if a pair violates
    1 <= first <= last < 2^31.
    """
    pairs = tuple(zip(steps[::2], steps[1::2], strict=False))
    if len(steps) % 2 or any(not 1 <= first <= last < 2**31 for first, last in pairs):
        raise UsageError(
            f"{key}={' '.join(map(str, steps))}: must be pairs of a first and a last step, such as "
            "10 20 25 30, with 1 <= first <= last < 2^31"
        )
    return pairs


def profile_range(config: Config) -> range:
    """Return the steps to profile, or an empty range if `profile_steps` is None.

    Raises `UsageError` if the value is not A:B with 1 <= A <= B <= train.max_iters.
    """
    text, end = config.profile_steps, config.train.max_iters
    if text is None:
        return range(0)
    found = re.fullmatch(r"([0-9]{1,10}):([0-9]{1,10})", text)
    if not found or not 1 <= int(found[1]) <= int(found[2]) <= end:
        raise UsageError(
            f"profile_steps={text}: must be A:B, the first and the last step to trace, with "
            f"1 <= A <= B <= train.max_iters={end}, such as 11:15 (quote it in YAML)"
        )
    return range(int(found[1]), int(found[2]) + 1)
