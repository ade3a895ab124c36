import math

import pytest

from jaxgpt.config import OptimizerConfig
from jaxgpt.optim import learning_rate_schedule


@pytest.mark.parametrize("step", [1, 50, 99, 100, 101, 1000, 1999, 2000, 5000])
def test_learning_rate_is_linear_then_cosine(step):
    config = OptimizerConfig(learning_rate=1e-3, min_lr=1e-4, warmup_iters=100, lr_decay_iters=2000)
    if step <= 100:
        expected = 1e-3 * step / 100
    else:
        share = min(1.0, (step - 100) / (2000 - 100))
        expected = 1e-4 + 0.5 * (1 + math.cos(math.pi * share)) * (1e-3 - 1e-4)
    assert float(learning_rate_schedule(config)(step)) == pytest.approx(expected, rel=1e-5)


def test_no_warmup_starts_at_the_peak():
    config = OptimizerConfig(learning_rate=1e-3, warmup_iters=0, lr_decay_iters=10)
    assert float(learning_rate_schedule(config)(0)) == pytest.approx(1e-3)
    assert float(learning_rate_schedule(config)(10)) == pytest.approx(1e-4)  # a tenth by default
