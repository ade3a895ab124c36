import dataclasses
import time

import jax
import pytest

from jaxgpt.config import load_config
from jaxgpt.perf.clock import Clock
from jaxgpt.perf.flops import Rates, StepTimer, flops_per_token, peak_flops


def test_flops_follow_the_formula_of_palm():
    # PaLM (arXiv 2204.02311), appendix B, for GPT-2 small: 6 x 123.55M + 12 x 12 x 12 x 64 x 1024.
    model = load_config("gpt2").model
    assert flops_per_token(model, 123_551_232) == 6 * 123_551_232 + 12 * 12 * 12 * 64 * 1024


def test_mfu_is_a_fraction_of_the_peak():
    # nanoGPT reports 135.6 k tokens/s of GPT-2 124M on one A100, which is 37 % of 312 TFLOP/s.
    flops = flops_per_token(load_config("gpt2").model, 123_551_232)
    rates = Rates(480, 1024, flops, 1, peak_flops("NVIDIA A100-SXM4-40GB", "bfloat16"))
    found = rates.of(480 * 1024 / 135_600)
    assert found["tokens_per_sec"] == pytest.approx(135_600)
    assert found["samples_per_sec"] == pytest.approx(135_600 / 1024)
    assert found["mfu"] == pytest.approx(0.37, abs=0.005)
    assert found["tflops_per_device"] == pytest.approx(found["mfu"] * 312)
    on_eight = Rates(480, 1024, flops, 8, 312e12).of(480 * 1024 / 135_600)
    assert on_eight["tokens_per_sec_per_device"] == pytest.approx(135_600 / 8)
    assert on_eight["mfu"] == pytest.approx(found["mfu"] / 8)


def test_an_unknown_device_has_no_mfu():
    assert peak_flops(jax.devices()[0].device_kind, "float32") is None  # a CPU
    assert peak_flops("TPU v5 lite", "bfloat16") is None
    assert peak_flops("NVIDIA H200", "float16") is None
    assert Rates(1, 1, 1, 1, None).of(1.0)["mfu"] is None
    assert set(Rates(1, 1, 1, 1, None).of(None).values()) == {None}


def test_time_between_steps_is_not_counted_and_waiting_is(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def passes(seconds):
        now[0] += seconds

    clock = Clock(time.time())
    clock.enter("step")
    timer = StepTimer(clock)
    for _ in range(4):
        with clock.within("data"):
            passes(1)
        with timer.waiting_for_device():
            passes(6)
        passes(3)
        timer.count()
    with clock.within("save"):
        passes(1000)
    # Own time excludes only waiting for devices.
    assert timer.host_times() == pytest.approx((4, 40, 16, 4))
    assert timer.lap() == pytest.approx((10, 0.1))
    passes(1)
    assert timer.lap() == (None, None)  # no step since


def test_a_warning_announces_steps_that_take_minutes_on_a_cpu():
    """2^27 tokens of 3.6 MFLOP each take 81 minutes at 100 GFLOP/s."""
    rates = Rates(2**20, 128, 3_600_000, n_devices=1, peak=None)
    (warning,) = rates.slow_step_warnings()
    assert "train.batch_size=1048576" in warning and "81 minutes" in warning
    assert "reduce train.batch_size or the batch size per device" in warning
    for changed in ({"peak": 1e15}, {"batch_size": 24}, {"n_devices": 2**10}):
        assert dataclasses.replace(rates, **changed).slow_step_warnings() == ()
