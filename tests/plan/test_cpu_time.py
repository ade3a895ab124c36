"""The step time that `plan` estimates for one CPU device."""

import json
import re

import pytest

from jobs import run

SMALL = ("model.n_layer=1", "model.n_embd=32", "model.n_head=2", "train.batch_size=4")


def test_the_report_states_the_assumed_matmul_speed():
    one = run("plan", "--config", "tiny", *SMALL)
    step, tokens_per_sec, share, gflops = re.search(
        r"ESTIMATE: step (\S+) s, (\S+) tokens/s, .* reaches (\d+)% of the (\S+) GFLOP/s",
        one.stdout,
    ).groups()
    flops = float(re.search(r"per token, (\S+) per step of 512 tokens", one.stdout)[1])
    assert float(step) == pytest.approx(flops / (float(gflops) * 1e9 * int(share) / 100), rel=0.02)
    assert float(tokens_per_sec.replace(",", "")) == pytest.approx(512 / float(step), rel=0.02)
    two = run("plan", "--config", "tiny", "--mesh", "2,1,1", *SMALL)
    assert "no estimate, because the speed of cpu is unknown" in two.stdout


@pytest.mark.long
@pytest.mark.parametrize("preset", ["tiny", "shakespeare_char_cpu", "llama-tiny"])
def test_the_estimate_agrees_with_measured_steps(preset):
    """Other work changes a CPU's speed from minute to minute.

    The estimate is therefore scaled to the speed of the matmuls that `bench step` times in turns
    with the steps.
    """
    job = run("bench", "step", "--config", preset, "--synthetic", "--json")
    assert job.returncode == 0, job.stdout
    found = json.loads(job.stdout.splitlines()[-1])
    plan = json.loads(run("plan", "--config", preset, "--json").stdout)
    estimate = plan["estimate"]
    peak_in_plan = plan["flops_per_step"] / estimate["step"] / estimate["mfu"]
    scale = peak_in_plan / found["matmul_flops_per_sec"]["median"]
    assert scale * estimate["step"] == pytest.approx(found["seconds_per_step"]["median"], rel=0.2)
