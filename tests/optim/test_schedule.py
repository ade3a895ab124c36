import dataclasses
import math

import pytest

from jaxgpt.config import OptimizerConfig
from jaxgpt.optim import learning_rate_schedule

CONFIG = OptimizerConfig(learning_rate=1e-3, min_lr=1e-4, warmup_iters=100, lr_decay_iters=2000)


@pytest.mark.parametrize("step", [1, 50, 99, 100, 101, 1000, 1999, 2000, 5000])
def test_learning_rate_is_linear_then_cosine(step):
    if step <= 100:
        expected = 1e-3 * step / 100
    else:
        share = min(1.0, (step - 100) / (2000 - 100))
        expected = 1e-4 + 0.5 * (1 + math.cos(math.pi * share)) * (1e-3 - 1e-4)
    assert float(learning_rate_schedule(CONFIG)(step)) == pytest.approx(expected, rel=1e-5)


def test_no_warmup_starts_at_the_peak():
    config = OptimizerConfig(learning_rate=1e-3, warmup_iters=0, lr_decay_iters=10)
    assert float(learning_rate_schedule(config)(0)) == pytest.approx(1e-3)
    assert float(learning_rate_schedule(config)(10)) == pytest.approx(1e-4)  # a tenth by default


@pytest.mark.parametrize("step", [1, 99, 100, 101, 1600, 1601, 1700, 1999, 2000, 5000])
@pytest.mark.parametrize(("shape", "power"), [("linear", 1.0), ("sqrt", 0.5)])
@pytest.mark.parametrize(("decay_iters", "start"), [(None, 1600), (1900, 100)])
def test_wsd_is_linear_then_stable_then_decays(step, shape, power, decay_iters, start):
    config = dataclasses.replace(
        CONFIG, schedule="wsd", wsd_decay=shape, wsd_decay_iters=decay_iters
    )
    share = min(1.0, max(0, step - start) / (2000 - start))
    expected = min(1e-3 * step / 100, 1e-4 + (1e-3 - 1e-4) * (1 - share**power))
    assert float(learning_rate_schedule(config)(step)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("step", "expected"), [(1, 1e-5), (100, 1e-3), (101, 1e-3), (5000, 1e-3)])
def test_constant_is_linear_then_the_peak(step, expected):
    config = dataclasses.replace(CONFIG, schedule="constant")
    assert float(learning_rate_schedule(config)(step)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_a_decay_to_zero_ends_at_zero(schedule):
    config = dataclasses.replace(CONFIG, schedule=schedule, min_lr=0.0)
    assert float(learning_rate_schedule(config)(2000)) == 0.0
