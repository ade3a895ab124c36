"""The last lines of a run's log."""

import importlib.machinery
import importlib.util
import json

import pytest

from jaxgpt.train.reporting.ending import WIDTH, ending_lines, sparkline


def test_a_sparkline_has_a_bar_for_the_mean_of_each_part():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([3.0, 3.0]) == "▁▁"
    halves = sparkline([0, 2] * WIDTH + [4, 6] * WIDTH)  # 4 values for each bar: means 1 and 5
    assert halves == "▁" * (WIDTH // 2) + "█" * (WIDTH // 2)


@pytest.fixture(params=[False, True])
def options(request, monkeypatch):
    """The options of the report command that work without Bokeh, and with it."""
    spec = importlib.machinery.ModuleSpec("bokeh", None) if request.param else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    return "" if request.param else " --text"


def test_the_last_lines_show_the_losses_and_where_to_look(tmp_path, options):
    records = [
        {
            "kind": "train",
            "step": s,
            "loss": 5.0 - s,
            "tokens_per_sec": 1000.0 * s,
            "skipped": False,
        }
        for s in range(1, 4)
    ]
    records.append({"kind": "train", "step": 4, "loss": None, "skipped": True})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    assert ending_lines(tmp_path, ["tensorboard --logdir here"]) == [
        "loss      4.0000 █▅▁ 2.0000  steps 1 to 3",
        "tokens/s  1,000 ▁▅█ 3,000  steps 1 to 3",
        f"log       {tmp_path}/train.log",
        "curves    tensorboard --logdir here",
        f"report    python -m jaxgpt.report {tmp_path}{options}",
    ]


def test_a_run_without_steps_has_no_sparklines(tmp_path, options):
    (tmp_path / "metrics.jsonl").write_text("")
    assert ending_lines(tmp_path, []) == [
        f"log       {tmp_path}/train.log",
        f"report    python -m jaxgpt.report {tmp_path}{options}",
    ]
