"""The training line: its content, and what is dropped first if it is too long."""

import pytest

from jaxgpt.tracking.figures import HOST_FIGURES, Figure, legend, train_line
from jaxgpt.train.step import STEP_METRICS

FIGURES = {name: metric.figure for name, metric in STEP_METRICS.items()} | HOST_FIGURES

RECORD = {
    "kind": "train", "step": 100, "loss": 2.4527, "grad_norm": 0.51234, "lr": 3e-3, "dt": 0.0581,
    "tokens_per_sec": 52_874.0, "tokens_per_sec_per_device": 26_437.0, "samples_per_sec": 413.1,
    "tflops_per_device": 0.1234, "mfu": 0.371, "data_wait": 0.002, "memory_bytes": 2**30,
    "memory_peak_bytes": 2**31, "slowest_over_mean": 1.25, "slowest_rank": 3, "seconds_left": 3661,
    "skipped_steps": 0, "nonfinite_steps": 0, "consumed_tokens": 307_200, "skipped": False,
}  # fmt: skip


def test_a_file_gets_every_figure_but_counts_of_nothing():
    line = train_line(RECORD, FIGURES, 300)
    assert line.startswith("step=100/300 loss=2.4527 gnorm=0.512 lr=0.003 dt=58.1ms tps=52,874 ")
    for word in ("mfu=37.1%", "mem=1.00GiB", "peak=2.00GiB", "slow=1.25@3", "left=1:01:01"):
        assert word in line
    assert len(line.split()) == 1 + len(FIGURES) - 2
    more = train_line({**RECORD, "skipped_steps": 3, "nonfinite_steps": 1}, FIGURES, 300)
    assert "skipped=3 nonfinite=1" in more


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_a_narrow_terminal_gets_what_matters_most(width):
    line = train_line(RECORD, FIGURES, 300, width)
    assert len(line) <= width and line.startswith("step=100/300 loss=2.4527")
    if width == 80:
        assert "mfu=" in line and "tps=" in line and "data=" not in line


def test_a_metric_is_shown_under_its_own_name_and_explained():
    figures = FIGURES | {"max_logit": Figure("largest logit")}
    record = {**RECORD, "max_logit": 12.5}
    assert "max_logit=12.5" in train_line(record, figures, 300)
    meanings = legend(record, figures, with_slowest=False)
    assert meanings["max_logit"] == "largest logit" and "slow" not in meanings
    assert set(meanings) >= {"loss", "gnorm", "lr", "tps"}


def test_losses_of_corpora_are_shown():
    corpora = {"web": {"tokens": 5, "loss": 2.5}, "code": {"tokens": 5, "loss": None}}
    assert "web=2.5000" in train_line({**RECORD, "corpora": corpora}, FIGURES, 300)
