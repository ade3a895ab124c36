"""Which checkpoints stay, and when one is due by the clock."""

import json
import math
from types import SimpleNamespace

import pytest

from jaxgpt.checkpoint import schedule
from jaxgpt.checkpoint.schedule import SaveClock, kept_steps, steps_to_remove
from jaxgpt.config import load_config
from jaxgpt.runtime.dispatch import LIMIT

SAVED = list(range(10, 101, 10))
LOSSES = dict(zip(SAVED, (4.0, 2.5, 3.0, 2.0, 2.5, 2.6, 2.7, 2.8, 2.9, 3.1), strict=True))


@pytest.mark.parametrize(
    ("settings", "stay"),
    [
        ((), {90, 100}),
        (("keep=1", "keep_every=30"), {30, 60, 90, 100}),
        (("keep=1", "keep_best=1"), {40, 100}),
        (("keep=1", "keep_best=3"), {20, 40, 50, 100}),  # 20 and 50 have the same loss
        (("keep=1", "keep_best=2"), {20, 40, 100}),  # of two that are equal the older one
        (("keep=2", "keep_every=50", "keep_best=1"), {40, 50, 90, 100}),
        (("keep=20",), set(SAVED)),
    ],
)
def test_the_newest_the_regular_and_the_best_stay(settings, stay):
    words = [f"checkpoint.{setting}" for setting in ("interval=10", *settings)]
    config = load_config("tiny", "train.eval_interval=10", *words)
    assert kept_steps(SAVED, config.checkpoint, False, LOSSES) == stay


def test_what_stays_never_comes_back_and_a_better_one_takes_its_place():
    """Over a whole run: the best of all so far are there, although most were removed long ago."""
    best = load_config("tiny", "checkpoint.keep=1", "checkpoint.keep_best=2").checkpoint
    losses, there = {}, []
    for step in range(1, 200):
        losses[step] = math.sin(step * step)
        there = sorted(kept_steps([*there, step], best, False, losses))
        assert set(there) == {step, *sorted(losses, key=losses.get)[:2]}


def test_losses_are_those_of_the_metrics_that_a_restart_finds(tmp_path):
    config = load_config("tiny", "checkpoint.keep=1", "checkpoint.keep_best=1")
    assert steps_to_remove(tmp_path, config, [10, 20, 30]) == {10, 20}  # nothing is known
    lines = [
        {"kind": "eval", "step": 10, "train_loss": 1.0, "val_loss": 2.0},
        {"kind": "eval", "step": 20, "train_loss": 0.5, "val_loss": None, "nonfinite": True},
        {"kind": "train", "step": 20, "val_loss": 0.1},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert steps_to_remove(tmp_path, config, [10, 20, 30]) == {20}


class Store(dict):
    """A key-value store."""

    def set(self, key, text):
        assert key not in self
        self[key] = text

    def get(self, key):
        return self[key]

    def delete(self, prefix):
        for key in [k for k in self if k.startswith(f"{prefix}/")]:
            del self[key]


@pytest.mark.parametrize("step_seconds", [0.05, 3.0, 100.0])
def test_all_processes_save_at_the_same_steps_once_the_minutes_have_passed(
    step_seconds, monkeypatch
):
    """Also those that are as far behind process 0 as they can be; its clock alone decides."""
    store, now, rank = Store(), [0.0], [0]
    monkeypatch.setattr(schedule, "key_value_store", lambda: store)
    monkeypatch.setattr(schedule, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(schedule, "jax", SimpleNamespace(process_index=lambda: rank[0]))
    lags = (0, 1, LIMIT)
    clocks = [SaveClock(minutes=10) for _ in lags]
    due = [[], [], []]
    end = int(35 * 60 / step_seconds)
    for step in range(1, end + LIMIT):
        now[0] += step_seconds
        for rank[0], lag in enumerate(lags):
            if step > lag and clocks[rank[0]].is_due():
                due[rank[0]] += [step - lag] * (step - lag < end)
                clocks[rank[0]].saved()
    assert due[0] == due[1] == due[2] and len(due[0]) in (2, 3)
    gaps = [step_seconds * (b - a) for a, b in zip([0, *due[0]], due[0], strict=False)]
    late = schedule.LOOK_SECONDS + step_seconds
    assert all(600 <= gap <= 600 + late for gap in gaps)
    assert len(store) <= schedule.KEYS_KEPT


def test_without_the_setting_the_clock_asks_for_nothing():
    clock = SaveClock(None)
    assert not any(clock.is_due() for _ in range(100))
