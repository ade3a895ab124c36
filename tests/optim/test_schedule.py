"""The learning rate, compared with the formulas in decimal arithmetic of 50 digits."""

import decimal
from decimal import Decimal

import numpy as np
import pytest

from jaxgpt.config import OptimizerConfig, load_config
from jaxgpt.optim.schedule import learning_rate
from jobs import SMALL, records, train_here

PI = Decimal("3.1415926535897932384626433832795028841971693993751")
CONFIG = OptimizerConfig(learning_rate=1e-3, min_lr=1e-4, warmup_iters=100, lr_decay_iters=2000)
CONFIGS = {
    "auroragpt-7b": load_config("auroragpt-7b").optimizer,
    "cosine to 0": load_config("auroragpt-7b", "optimizer.min_lr=0").optimizer,
    "gpt2": load_config("gpt2").optimizer,
    "a tenth": load_config("gpt2", "optimizer.min_lr=None").optimizer,
    "linear": load_config("gpt2", "optimizer.schedule=linear").optimizer,
    "linear to 0": load_config("megatron", "optimizer.warmup_iters=10").optimizer,
    "no warm-up": load_config("gpt2", "optimizer.warmup_iters=0").optimizer,
    "wsd to 0": load_config("smollm2-135m").optimizer,
    "sqrt to 0": load_config("smollm2-135m", "optimizer.wsd_decay=sqrt").optimizer,
    "sqrt": load_config(
        "smollm2-135m", "optimizer.wsd_decay=sqrt", "optimizer.min_lr=1e-5",
        "optimizer.wsd_decay_iters=None",
    ).optimizer,
    "longest": load_config(
        "smollm2-135m", f"optimizer.lr_decay_iters={2**31 - 1}", "optimizer.wsd_decay=sqrt",
        f"optimizer.wsd_decay_iters={2**31 - 2001}",
    ).optimizer,
    "constant": load_config("finetune_shakespeare", "optimizer.warmup_iters=7").optimizer,
}  # fmt: skip


def cosine(x):
    """cos(x), by its Taylor series."""
    total, term, n = Decimal(0), Decimal(1), 0
    while abs(term) > Decimal(10) ** -48:
        total, n = total + term, n + 2
        term *= -x * x / (n * (n - 1))
    return total


def exact(config, step):
    """Return the exact learning rate: warm-up, then nanoGPT's cosine, a line, wsd or the peak.

    The formulas of wsd are in arXiv 2404.06395 and 2405.18392.
    """
    peak = Decimal(config.learning_rate)
    floor = peak / 10 if config.min_lr is None else Decimal(config.min_lr)
    warmup, end = config.warmup_iters, config.lr_decay_iters
    if step < warmup:
        return peak * step / warmup
    if config.schedule == "constant":
        return peak
    if config.schedule in ("cosine", "linear"):
        x = min(Decimal(step - warmup) / (end - warmup), Decimal(1))
        if config.schedule == "linear":
            return peak - x * (peak - floor)
        return floor + (1 + cosine(PI * x)) / 2 * (peak - floor)
    length = config.wsd_decay_iters or end // 5
    x = min(max(Decimal(step - (end - length)) / length, Decimal(0)), Decimal(1))
    return floor + (1 - (x.sqrt() if config.wsd_decay == "sqrt" else x)) * (peak - floor)


def steps_of(config):
    """Return the steps at both ends of each part of the schedule, and 500 random steps."""
    end = config.lr_decay_iters
    ends = [1, config.warmup_iters, config.wsd_decay_start, end]
    near = {step + i for step in ends for i in range(-20, 21)}
    drawn = np.random.default_rng(0).integers(1, end, 500).tolist()
    return sorted(step for step in near | set(drawn) if 1 <= step < 2**31)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_learning_rate_is_exact_to_one_unit_in_the_last_place(name):
    config = CONFIGS[name]
    with decimal.localcontext(prec=50):
        for step in steps_of(config):
            found, expected = learning_rate(config, step), exact(config, step)
            assert found.dtype == np.float32
            unit = Decimal(float(np.spacing(np.float32(expected))))
            assert abs(Decimal(float(found)) - expected) <= unit, step


@pytest.mark.parametrize("name", ["cosine to 0", "linear to 0", "wsd to 0", "sqrt to 0"])
def test_a_decay_to_zero_ends_at_zero(name):
    config = CONFIGS[name]
    assert learning_rate(config, config.lr_decay_iters - 1) > 0
    assert learning_rate(config, config.lr_decay_iters) == 0


def test_the_last_step_of_warm_up_has_the_peak():
    for config in CONFIGS.values():
        assert learning_rate(config, config.warmup_iters) == np.float32(config.learning_rate)


def test_trained_and_skipped_steps_log_the_same_digits(tmp_path):
    """AuroraGPT's schedule has a warm-up of 31,789 steps."""
    c = load_config("auroragpt-7b").optimizer
    schedule = [
        f"optimizer.{key}={getattr(c, key)}"
        for key in ("learning_rate", "min_lr", "warmup_iters", "lr_decay_iters")
    ]
    options = (*SMALL, *schedule, "train.max_iters=8", "train.log_interval=1", "--mesh", "1,1,1")
    train_here(*options, "--out", tmp_path / "trained")
    train_here(*options, "--train-range-to-skip", "2", "6", "--out", tmp_path / "skipped")
    trained, skipped = (
        [r["lr"] for r in records(tmp_path / name)] for name in ("trained", "skipped")
    )
    assert trained == skipped and len(trained) == 8
    assert [f"{lr:.6g}" for lr in trained[:3]] == ["9.43723e-09", "1.88745e-08", "2.83117e-08"]
