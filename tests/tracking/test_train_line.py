"""The training line: its content, and what is dropped first if it is too long."""

import pytest

from jaxgpt.tracking.train_line import HOST_METRICS, MetricFormat, legend, train_line
from jaxgpt.train.step import STEP_METRICS

FORMATS = {name: metric.format for name, metric in STEP_METRICS.items()} | HOST_METRICS

RECORD = {
    "kind": "train", "step": 100, "loss": 2.4527, "grad_norm": 0.51234, "lr": 3e-3, "dt": 0.0581,
    "tokens_per_sec": 52_874.0, "tokens_per_sec_per_device": 26_437.0, "samples_per_sec": 413.1,
    "tflops_per_device": 0.1234, "mfu": 0.371, "data_wait": 0.002, "memory_bytes": 2**30,
    "memory_peak_bytes": 2**31, "slowest_over_mean": 1.25, "slowest_rank": 3, "seconds_left": 3661,
    "skipped_steps": 0, "nonfinite_steps": 0, "consumed_tokens": 307_200, "skipped": False,
}  # fmt: skip


def test_a_file_gets_every_figure_but_counts_of_nothing():
    line = train_line(RECORD, FORMATS, 300)
    assert line.startswith("step=100/300 loss=2.4527 gnorm=0.512 lr=0.003 dt=58.1ms tps=52,874 ")
    for word in ("mfu=37.1%", "mem=1.00GiB", "peak=2.00GiB", "slow=1.25@3", "left=1:01:01"):
        assert word in line
    assert len(line.split()) == 1 + len(FORMATS) - 2 - 2  # no counts of nothing, no evaluation yet
    assert line.endswith(" tokens=307,200")
    more = train_line({**RECORD, "skipped_steps": 3, "nonfinite_steps": 1}, FORMATS, 300)
    assert "skipped=3 nonfinite=1" in more


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_a_narrow_terminal_gets_what_matters_most(width):
    line = train_line(RECORD, FORMATS, 300, width)
    assert len(line) <= width and line.startswith("step=100/300 loss=2.4527")
    if width == 80:
        assert "mfu=" in line and "tps=" in line and "data=" not in line
    short = {**RECORD, "loss": 2.5, "lr": 1.0, "dt": 1e-3, "tokens_per_sec": 9.0}
    assert names_of(train_line(short, FORMATS, 300, width)) == names_of(line)
    first = {k: v for k, v in RECORD.items() if k not in HOST_METRICS or k == "memory_bytes"}
    assert names_of(train_line(first, FORMATS, 300, width)) <= names_of(line)


def names_of(line):
    return {word.partition("=")[0] for word in line.split()}


def test_a_slow_run_shows_its_sequences_per_second():
    line = train_line({**RECORD, "samples_per_sec": 1 / 24.58}, FORMATS, 300)
    assert " sps=0.041 " in line


def test_a_metric_is_shown_under_its_own_name_and_explained():
    metrics = FORMATS | {"max_logit": MetricFormat("largest logit")}
    record = {**RECORD, "max_logit": 12.5}
    assert "max_logit=12.5" in train_line(record, metrics, 300)
    meanings = dict(
        line.split(maxsplit=1) for line in legend(metrics, 300, corpora=["web", "code"])
    )
    assert meanings["max_logit"] == "largest logit"
    assert set(meanings) == {"step", "web", "code"} | {f.short or n for n, f in metrics.items()}


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_legend_of_a_narrow_terminal_explains_what_it_shows(width):
    """No field of a usual line is left unexplained, and no line of the legend wraps."""
    lines = legend(FORMATS, 300, width=width)
    line = train_line({**RECORD, "train_loss": 2.5, "val_loss": 2.75}, FORMATS, 300, width)
    assert names_of(line) <= {text.split()[0] for text in lines}
    assert len(lines) < len(legend(FORMATS, 300)) and max(map(len, lines)) <= 80


def test_a_chosen_number_is_on_every_line():
    pinned = FORMATS | {"consumed_tokens": FORMATS["consumed_tokens"]._replace(rank=-1)}
    for width in (20, 40, 80):
        line = train_line(RECORD, pinned, 300, width)
        assert line.startswith("step=100/300 ") and line.endswith(" tokens=307,200")
        assert len(line) <= max(width, len("step=100/300 tokens=307,200"))


def test_a_skipped_step_shows_its_range_time_count_and_tokens():
    record = {
        "kind": "train", "step": 12, "loss": None, "grad_norm": None, "lr": 3e-3, "dt": 0.0012,
        "tokens_per_sec": None, "skipped_steps": 3, "consumed_tokens": 36_864, "skipped": True,
        "skipped_range": (10, 20),
    }  # fmt: skip
    assert train_line(record, FORMATS, 300, 80) == (
        "step=12/300 skipped range=10-20 lr=0.003 dt=1.2ms skipped=3 tokens=36,864"
    )


def test_losses_of_corpora_are_shown():
    corpora = {"web": {"tokens": 5, "loss": 2.5}, "code": {"tokens": 5, "loss": None}}
    assert "web=2.5000" in train_line({**RECORD, "corpora": corpora}, FORMATS, 300)
