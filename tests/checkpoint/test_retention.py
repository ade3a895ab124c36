"""Which checkpoints are kept, by the retention settings."""

import json
import math

import pytest

from jaxgpt.checkpoint.retention import kept_steps, steps_to_remove
from jaxgpt.config import load_config

SAVED = list(range(10, 101, 10))
LOSSES = dict(zip(SAVED, (4.0, 2.5, 3.0, 2.0, 2.5, 2.6, 2.7, 2.8, 2.9, 3.1), strict=True))


@pytest.mark.parametrize(
    ("settings", "stay"),
    [
        ((), {90, 100}),
        (("keep=1", "keep_every=30"), {30, 60, 90, 100}),
        (("keep=1", "keep_best=1"), {40, 100}),
        (("keep=1", "keep_best=3"), {20, 40, 50, 100}),  # 20 and 50 have the same loss
        (("keep=1", "keep_best=2"), {20, 40, 100}),  # the older one of two with equal losses
        (("keep=2", "keep_every=50", "keep_best=1"), {40, 50, 90, 100}),
        (("keep=20",), set(SAVED)),
    ],
)
def test_the_newest_the_regular_and_the_best_stay(settings, stay):
    words = [f"checkpoint.{setting}" for setting in ("interval=10", *settings)]
    config = load_config("tiny", "train.eval_interval=10", *words)
    assert kept_steps(SAVED, config.checkpoint, False, LOSSES) == stay


def test_a_run_that_may_rewind_keeps_as_many_checkpoints_to_rewind_to():
    config = load_config("tiny", "checkpoint.interval=20", "checkpoint.keep=3")
    assert kept_steps(SAVED, config.checkpoint, True, {}) == {60, 80, 90, 100}
    assert kept_steps(SAVED, config.checkpoint, False, {}) == {80, 90, 100}


def test_what_stays_never_comes_back_and_a_better_one_takes_its_place():
    """At each save, the best checkpoints so far are kept, even after others have been removed."""
    best = load_config("tiny", "checkpoint.keep=1", "checkpoint.keep_best=2").checkpoint
    losses, there = {}, []
    for step in range(1, 200):
        losses[step] = math.sin(step * step)
        there = sorted(kept_steps([*there, step], best, False, losses))
        assert set(there) == {step, *sorted(losses, key=losses.get)[:2]}


def test_losses_are_those_of_the_metrics_that_a_restart_finds(tmp_path):
    config = load_config("tiny", "checkpoint.keep=1", "checkpoint.keep_best=1")
    assert steps_to_remove(tmp_path, config, [10, 20, 30]) == {10, 20}  # no losses are known
    lines = [
        {"kind": "eval", "step": 10, "train_loss": 1.0, "val_loss": 2.0},
        {"kind": "eval", "step": 20, "train_loss": 0.5, "val_loss": None, "nonfinite": True},
        {"kind": "train", "step": 20, "val_loss": 0.1},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert steps_to_remove(tmp_path, config, [10, 20, 30]) == {20}
