"""The tracker that the README of jaxgpt/tracking adds."""

import csv

import pytest

from jaxgpt import tracking
from jobs import SMALL, records, train_here
from readme_code import load_block, train_and_move


@pytest.mark.long  # the next two tests are short versions
def test_the_readme_s_tracker_follows_a_run_to_another_mesh(tmp_path, monkeypatch):
    module = load_block("jaxgpt/tracking/README.md", "jaxgpt.tracking.losses", tmp_path)
    monkeypatch.setitem(tracking.TRACKERS, "losses", module.Losses)
    out = tmp_path / "run"
    losses = train_and_move(train_here, records, out, *SMALL, "train.trackers=losses")
    written = {int(step): float(loss) for step, loss in csv.reader((out / "losses.csv").open())}
    assert written == losses and list(written) == [1, 2, 3, 4, 5, 6]


def test_it_drops_what_a_rewind_drops(tmp_path):
    from types import SimpleNamespace

    from jaxgpt.tracking.records import TrainRecord

    module = load_block("jaxgpt/tracking/README.md", "jaxgpt.tracking.losses", tmp_path)
    tracker = module.Losses()
    tracker.open(SimpleNamespace(directory=tmp_path), None)
    for step in (1, 2, 3):
        tracker.log(TrainRecord(step=step, values={"loss": 1.0}, consumed_tokens=0))
    tracker.rewind(1)
    tracker.log(TrainRecord(step=2, values={"loss": 2.0}, consumed_tokens=0))
    tracker.close()
    assert list(csv.reader((tmp_path / "losses.csv").open())) == [["1", "1.0"], ["2", "2.0"]]


@pytest.mark.parametrize(
    "trackers", [pytest.param("tensorboard", marks=pytest.mark.long), "losses"]
)
def test_no_tracker_changes_the_losses(tmp_path, monkeypatch, trackers):
    module = load_block("jaxgpt/tracking/README.md", "jaxgpt.tracking.losses", tmp_path)
    monkeypatch.setitem(tracking.TRACKERS, "losses", module.Losses)
    found = []
    for name in ("", trackers):
        out = tmp_path / f"run{name}"
        train_here(*SMALL, "train.max_iters=3", f"train.trackers={name}", "--out", out,
                   "--mesh", "1,1,1")  # fmt: skip
        found.append([r["loss"] for r in records(out)])
    assert found[0] == found[1]
