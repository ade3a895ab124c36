"""The checkpoints that a run leaves, and the records about them."""

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxgpt.checkpoint import checkpointer
from jaxgpt.checkpoint.checkpointer import Checkpoints
from jaxgpt.checkpoint.local import LocalFolder
from jaxgpt.checkpoint.metadata import list_checkpoints
from jaxgpt.cluster import shutdown as exits
from jaxgpt.config import UsageError
from jaxgpt.tracking.records import EvalRecord
from jaxgpt.train import setup
from jobs import SMALL, losses, records, train_here

MESH = ("--mesh", "1,1,1", "train.trackers=")
# Validation losses by step: the best is early, as of a model that learns its text by heart.
LOSSES = {2: 3.0, 4: 1.0, 6: 2.5, 8: 2.0, 10: 4.0, 12: 5.0, 14: 6.0}


@pytest.fixture
def known_losses(monkeypatch):
    monkeypatch.setattr(
        setup,
        "make_evaluator",
        lambda *_: lambda step, _: EvalRecord(step=step, train_loss=1.0, val_loss=LOSSES[step]),
    )


@pytest.mark.long
def test_the_best_and_the_regular_checkpoints_outlive_restarts(tmp_path, known_losses, monkeypatch):
    complete, log = [], setup.Reporter.log

    def look(self, record):
        if record is not None and record.kind == "checkpoint":
            complete.append((Path(record.path) / "meta" / "metadata").exists())
        log(self, record)

    monkeypatch.setattr(setup.Reporter, "log", look)
    settings = ("interval=2", "keep=1", "keep_every=6", "keep_best=2")
    keep = (*(f"checkpoint.{s}" for s in settings), "train.eval_interval=2", "train.max_iters=14")
    arguments = (*SMALL, *MESH, *keep, "--out", tmp_path)
    assert train_here(*arguments, stop_at=9) == exits.STOPPED
    # Best of those evaluated: 4 and 8 (at the end, 9 itself was not); of 6: 6; the newest: 9.
    assert list_checkpoints(tmp_path) == [4, 6, 8, 9]
    assert train_here("--out", tmp_path) == exits.DONE
    assert list_checkpoints(tmp_path) == [4, 6, 8, 12, 14]
    found = records(tmp_path, "checkpoint")
    assert [r["step"] for r in found] == [2, 4, 6, 8, 9, 10, 12, 14]
    assert complete == [True] * 8
    assert all(0 <= r["stalled"] <= r["seconds"] for r in found)
    log = (tmp_path / "train.log").read_text()
    assert "step=14 checkpoint complete after " in log


def test_a_run_trains_on_through_a_full_disk_and_a_restart(tmp_path, monkeypatch):
    save = Checkpoints._save

    def full_at_4_and_6(self, step, *arguments):
        if step in (4, 6):
            raise OSError(28, "No space left on device")
        save(self, step, *arguments)

    monkeypatch.setattr(Checkpoints, "_save", full_at_4_and_6)
    arguments = (*SMALL, *MESH, "checkpoint.interval=2", "train.max_iters=9", "--out", tmp_path)
    assert train_here(*arguments, stop_at=7) == exits.STOPPED
    failed = records(tmp_path, "checkpoint_failed")
    assert [(r["step"], r["latest_complete"]) for r in failed] == [(4, 2), (6, 2)]
    assert [r["step"] for r in records(tmp_path, "checkpoint")] == [2, 7]
    warning = "checkpoint 4 could not be written (No space left on device); the run continues"
    assert (tmp_path / "train.log").read_text().count(warning) == 1
    assert train_here("--out", tmp_path) == exits.DONE
    assert list(losses(tmp_path)) == list(range(1, 10))


def test_a_run_whose_last_save_fails_does_not_say_that_it_is_done(tmp_path, monkeypatch):
    def full(self, step, *arguments):
        raise OSError(30, "Read-only file system")

    arguments = (*SMALL, *MESH, "checkpoint.interval=2", "--out", tmp_path)
    assert train_here(*arguments, "train.max_iters=2") == exits.DONE
    monkeypatch.setattr(Checkpoints, "_save", full)
    with pytest.raises(UsageError, match="checkpoint 3 could not be written .Read-only file sys"):
        train_here("--out", tmp_path, "train.max_iters=3")
    assert "done after step 3" not in (tmp_path / "train.log").read_text()
    assert list_checkpoints(tmp_path) == [2]


@pytest.mark.parametrize(
    ("full_at", "on_error", "saved"), [((4,), "stop", [2, 5]), ((4, 5), "continue", [2])]
)
def test_a_failed_save_does_not_hide_why_a_run_failed(
    full_at, on_error, saved, tmp_path, monkeypatch
):
    save = Checkpoints._save

    def full(self, step, *arguments):
        if step in full_at:
            raise OSError(28, "No space left on device")
        save(self, step, *arguments)

    monkeypatch.setattr(Checkpoints, "_save", full)
    fault = ("faults.nan_step=5", "spike.max_consecutive_nonfinite=1")
    settings = ("checkpoint.interval=2", f"checkpoint.on_error={on_error}", "train.max_iters=9")
    assert train_here(*SMALL, *MESH, *settings, *fault, "--out", tmp_path) == exits.FAILED
    assert list_checkpoints(tmp_path) == saved
    log = (tmp_path / "train.log").read_text()
    for step in full_at:
        assert log.count(f"checkpoint {step} could not be written (No space left on device)") == 1
    assert "error: spike.max_consecutive_nonfinite=1: the loss or gradient was not finite" in log


def test_a_run_that_failed_at_its_last_step_fails_again(tmp_path):
    out, metrics = ("--out", tmp_path), tmp_path / "metrics.jsonl"
    settings = ("train.max_iters=3", "train.eval_interval=3", "spike.action=off")
    assert train_here(*SMALL, *MESH, *settings, "faults.nan_step=2", *out) == exits.FAILED
    assert list_checkpoints(tmp_path) == [3]
    assert train_here(*out) == exits.FAILED
    log = (tmp_path / "train.log").read_text()
    assert "error: the run has failed at step 3: train.max_iters=3: the loss of the last st" in log
    # Its last evaluation may be missing.
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(line for line in lines if '"kind": "eval"' not in line))
    assert train_here(*out) == exits.FAILED
    assert [r["step"] for r in records(tmp_path, "eval")] == [3]


def test_a_job_saves_by_the_clock(tmp_path, monkeypatch):
    """With 100 s per step, a log line every 2 steps and 9 minutes, it saves every 600 s."""
    now = [0.0]
    clocks = {"perf_counter": time.perf_counter, "time": time.time, "monotonic": lambda: now[0]}
    monkeypatch.setattr(checkpointer, "time", SimpleNamespace(**clocks))

    def is_due(self, step):
        now[0] += 100
        return original(self, step)

    original = Checkpoints.is_due
    monkeypatch.setattr(Checkpoints, "is_due", is_due)
    arguments = "train.log_interval=2", "checkpoint.interval_minutes=9", "train.max_iters=20"
    arguments = (*SMALL, *MESH, *arguments, "checkpoint.interval=0", "checkpoint.keep=50")
    assert train_here(*arguments, "--out", tmp_path) == exits.DONE
    assert list_checkpoints(tmp_path) == [6, 12, 18, 20]


@pytest.fixture
def interrupted(tmp_path, monkeypatch):
    """Save checkpoint 2 to the run directory, and checkpoint 4 only to the local folder."""
    copy = LocalFolder.copy_to_run

    def fail_at_4(self, step):
        if step == 4:
            raise OSError(5, "Input/output error")
        copy(self, step)

    out, local = tmp_path / "run", f"checkpoint.local={tmp_path / 'nvme'}"
    arguments = (*SMALL, *MESH, "checkpoint.interval=2", "--out", out, local)
    with monkeypatch.context() as patch:
        patch.setattr(LocalFolder, "copy_to_run", fail_at_4)
        with pytest.raises(UsageError, match="checkpoint 4 could not .*Input/output error"):
            train_here(*arguments, "train.max_iters=4")
    assert list_checkpoints(out) == [2]
    return out, local


def test_a_run_continues_from_a_local_checkpoint_whose_copy_was_interrupted(interrupted):
    out, _ = interrupted
    assert train_here("--out", out, "train.max_iters=5") == exits.DONE
    log = (out / "train.log").read_text()
    assert "checkpoint 4: copied from" in log and "resumed from step 4" in log
    assert list(losses(out)) == list(range(1, 6))


def test_a_local_checkpoint_that_a_start_without_the_folder_has_abandoned_is_not_used(interrupted):
    out, local = interrupted
    continued = ("checkpoint.local=null", "checkpoint.interval=0", "train.max_iters=5")
    assert train_here("--out", out, *continued) == exits.DONE
    assert train_here("--out", out, local, "train.max_iters=6") == exits.DONE
    assert list_checkpoints(out) == [5, 6]
    log = (out / "train.log").read_text()
    assert "checkpoint 4 is not used, because the run has since continued" in log
