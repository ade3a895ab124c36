"""Where records go, and what may go wrong on the way."""

import json
import resource
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxgpt.config import UsageError, load_config
from jaxgpt.tracking import TRACKERS, Trackers, check_trackers
from jaxgpt.tracking.background import LIMIT, BackgroundTracker
from jaxgpt.tracking.console import Console
from jaxgpt.tracking.jsonl import JsonLines, read_records
from jaxgpt.tracking.records import EvalRecord, TrainRecord
from jaxgpt.tracking.tensorboard import TensorBoard


def run_in(directory, *trackers):
    config = load_config("tiny").replace(train__trackers=trackers)
    return SimpleNamespace(directory=directory, config=config)


def trained(step, **values):
    return TrainRecord(step=step, values=values, consumed_tokens=0)


def opened(tracker, directory, resume_step=None):
    tracker.open(run_in(directory), resume_step)
    return tracker


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def events_of(directory):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory / "tensorboard"))
    events.Reload()
    return events


def test_numbers_that_are_not_finite_become_null(tmp_path):
    file = opened(JsonLines(), tmp_path)
    file.log(trained(1, loss=float("nan"), lr=0.1))
    file.log(trained(2, loss=1.0, lr=0.1))
    file.close()
    first, second = lines(tmp_path / "metrics.jsonl")
    assert first["loss"] is None and first["lr"] == 0.1 and first["nonfinite"]
    assert "nonfinite" not in second


def test_a_resumed_file_holds_no_step_twice(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = opened(JsonLines(), tmp_path)
    for step in range(1, 8):
        file.log(trained(step))
    file.close()
    with path.open("a") as f:
        f.write('{"kind": "eval", "step": null}\n')  # another program's
        f.write('{"kind": "train", "st')  # killed while writing
    file = opened(JsonLines(), tmp_path, 4)
    file.log(trained(5))
    file.close()
    assert [r["step"] for r in lines(path)] == [1, 2, 3, 4, 5]


def test_a_full_disk_stops_the_log_file_only(capsys):
    console = Console(enabled=True, log_file=Path("/dev/full"))
    console.info("one")
    console.info("two")
    printed = capsys.readouterr().out
    assert "train.log stopped" in printed and "two" in printed


def test_a_run_that_starts_over_keeps_the_old_numbers_aside(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "eval", "step": 0}\n')
    opened(JsonLines(), tmp_path).close()
    assert lines(path) == []
    assert lines(tmp_path / "metrics.jsonl.old") == [{"kind": "eval", "step": 0}]
    path.write_text('{"kind": "train", "step": 2}\n')
    opened(JsonLines(), tmp_path).close()
    assert lines(tmp_path / "metrics.jsonl.old") == [{"kind": "eval", "step": 0}]
    assert lines(tmp_path / "metrics.jsonl.old.2") == [{"kind": "train", "step": 2}]


def test_what_a_host_that_went_down_left_in_the_file_is_not_read(tmp_path):
    path, line = tmp_path / "metrics.jsonl", b'{"kind": "sample", "step": 1, "text": ""}\n'
    path.write_bytes(line + b'{"kind": "eval"}\n[1]\n\0\0\xff\xfe\n' + line + b'{"kind": "ev')
    assert read_records(path) == 2 * [json.loads(line)]
    opened(JsonLines(), tmp_path, 1).close()
    assert path.read_bytes() == 2 * line


def test_metrics_that_cannot_be_rewritten_stay_as_they_are(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"kind": "train", "step": {step}}}\n' for step in range(100)))
    before = path.read_text()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**10, hard))  # as on a full disk
    try:
        for resume_step in (50, None):
            with pytest.raises(
                UsageError, match=r"metrics.jsonl.*: cannot be written \(File too large"
            ):
                opened(JsonLines(), tmp_path, resume_step)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [f.name for f in tmp_path.iterdir()] == ["metrics.jsonl"] and path.read_text() == before


def test_rewinds_stay_whatever_is_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    records = [{"kind": "train", "step": s, "loss": 1.0} for s in range(1, 6)]
    records.append({"kind": "rewind", "step": 5, "spike": 9})
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    opened(JsonLines(), tmp_path, 2).close()
    assert [(r["kind"], r["step"]) for r in lines(path)] == [
        ("train", 1), ("train", 2), ("rewind", 5),
    ]  # fmt: skip
    opened(JsonLines(), tmp_path).close()
    assert [r["kind"] for r in lines(path)] == ["rewind"]
    assert len(lines(tmp_path / "metrics.jsonl.old")) == 3


class Fails:
    """A tracker that cannot be written to."""

    def open(self, run, resume_step):
        pass

    def log(self, record):
        raise OSError("disk full")

    def close(self):
        raise AssertionError("was dropped")


class Hangs(Fails):
    """A tracker whose server does not answer."""

    def log(self, record):
        threading.Event().wait()


@pytest.mark.parametrize(
    ("tracker", "reason"), [(Fails, "disk full"), (Hangs, f"it is {LIMIT} records behind")]
)
def test_a_tracker_that_fails_or_hangs_is_dropped_with_one_warning(
    tmp_path, monkeypatch, tracker, reason
):
    monkeypatch.setitem(TRACKERS, "hosted", tracker)
    warnings, n_steps = [], LIMIT + 10
    trackers = Trackers(run_in(tmp_path, "hosted"), None, warnings.append)
    for step in range(1, n_steps + 1):
        trackers.log(trained(step))
    trackers.close()
    (warning,) = warnings
    assert warning.startswith(f"warning: train.trackers=hosted stopped: {reason};")
    assert len(lines(tmp_path / "metrics.jsonl")) == n_steps


def test_the_end_of_a_run_waits_for_a_tracker_only_so_long():
    tracker = BackgroundTracker(Hangs())
    tracker.log(trained(1))
    with pytest.raises(TimeoutError, match="it has not finished after 0 s"):
        tracker.close(seconds=0)


def test_a_full_disk_behind_tensorboard_stops_tensorboard_only(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    tracker = BackgroundTracker(TensorBoard())
    tracker.open(run_in(tmp_path), None)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**9, hard))  # as on a full disk
    try:
        with pytest.raises(OSError, match="File too large"):  # with which it is dropped
            for step in range(LIMIT - 10):
                tracker.log(EvalRecord(step=step, train_loss=1.0, val_loss=1.0))
            tracker.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_an_unknown_tracker_is_refused_with_those_that_there_are():
    with pytest.raises(UsageError, match=r"train.trackers=tensorbord: unknown.*tensorboard"):
        check_trackers(["tensorbord"])


@pytest.mark.parametrize("resume_step", [None, 2])
def test_tensorboard_shows_no_step_twice(tmp_path, resume_step):
    for value, start, resume in ((1.0, 1, None), (2.0, (resume_step or 0) + 1, resume_step)):
        tracker = opened(TensorBoard(), tmp_path, resume)
        for step in range(start, 5):
            tracker.log(trained(step, loss=value))
        tracker.close()
    shown = [(e.step, e.value) for e in events_of(tmp_path).Scalars("train/loss")]
    kept = resume_step or 0
    assert shown == [(s, 1.0 if s <= kept else 2.0) for s in range(1, 5)]


def test_tensorboard_shows_no_step_twice_after_a_rewind(tmp_path):
    tracker = opened(TensorBoard(), tmp_path)
    for step in range(1, 5):
        tracker.log(trained(step, loss=1.0))
    tracker.rewind(2)
    tracker.log(trained(3, loss=2.0))
    tracker.close()
    shown = [(e.step, e.value) for e in events_of(tmp_path).Scalars("train/loss")]
    assert shown == [(1, 1.0), (2, 1.0), (3, 2.0)]


def test_tensorboard_reads_what_was_written(tmp_path):
    from jaxgpt.tracking.records import SampleRecord

    tracker = opened(TensorBoard(), tmp_path)
    for step in (1, 200):
        tracker.log(trained(step, loss=4.0 / step))
    tracker.log(EvalRecord(step=200, train_loss=1.25, val_loss=1.5))
    tracker.log(SampleRecord(step=200, text="Grüße, " * 100))
    tracker.close()
    events = events_of(tmp_path)
    assert {"train/loss", "eval/train_loss", "eval/val_loss"} <= set(events.Tags()["scalars"])
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [
        (1, 4.0), (200, pytest.approx(0.02)),
    ]  # fmt: skip
    (text,) = events.Tensors("sample/text_summary")
    assert text.tensor_proto.string_val[0].decode() == "Grüße, " * 100


def test_numbers_inside_of_records_are_shown_and_cleaned_too(tmp_path):
    corpora = {"web": {"tokens": 128, "loss": 2.5}, "code": {"tokens": 64, "loss": float("nan")}}
    record = TrainRecord(step=1, values={}, consumed_tokens=192, corpora=corpora)
    for tracker in (JsonLines(), TensorBoard()):
        opened(tracker, tmp_path)
        tracker.log(record)
        tracker.close()
    (found,) = lines(tmp_path / "metrics.jsonl")
    assert found["corpora"]["code"] == {"tokens": 64, "loss": None} and found["nonfinite"]
    assert [e.value for e in events_of(tmp_path).Scalars("train/corpora/web/loss")] == [2.5]
