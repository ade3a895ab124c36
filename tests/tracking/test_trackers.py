import json
import resource
import time
from pathlib import Path

import pytest

from jaxgpt.config import UsageError
from jaxgpt.tracking.console import Console
from jaxgpt.tracking.trackers import MetricsFile, TensorBoard, Trackers, read_records


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_numbers_that_are_not_finite_become_null(tmp_path):
    file = MetricsFile(tmp_path / "m.jsonl", None)
    file.log({"kind": "train", "step": 1, "loss": float("nan"), "lr": 0.1})
    file.log({"kind": "train", "step": 2, "loss": 1.0, "lr": 0.1})
    file.close()
    first, second = lines(tmp_path / "m.jsonl")
    assert first == {"kind": "train", "step": 1, "loss": None, "lr": 0.1, "nonfinite": True}
    assert "nonfinite" not in second


def test_a_resumed_file_holds_no_step_twice(tmp_path):
    path = tmp_path / "m.jsonl"
    file = MetricsFile(path, None)
    for step in range(1, 8):
        file.log({"kind": "train", "step": step})
    file.close()
    with path.open("a") as f:
        f.write('{"kind": "eval", "step": null}\n')  # another program's
        f.write('{"kind": "train", "st')  # killed while writing
    file = MetricsFile(path, 4)
    file.log({"kind": "train", "step": 5})
    file.close()
    assert [r["step"] for r in lines(path)] == [1, 2, 3, 4, 5]


def test_a_full_disk_is_an_error_at_once_and_not_a_hang(tmp_path):
    """tensorboardX's own writer fails in a thread, and its queue then blocks for ever."""
    tracker = TensorBoard(tmp_path, None)
    tracker.log({"kind": "train", "step": 0, "loss": 1.0})
    tracker._writer._py_recordio_writer._writer.close()
    tracker._writer._py_recordio_writer._writer = open("/dev/full", "wb", buffering=0)
    said = []
    trackers = Trackers([tracker], said.append)
    for step in range(100):
        trackers.log({"kind": "train", "step": step, "loss": 1.0})
    (warning,) = said
    assert "TensorBoard stopped" in warning and "No space left" in warning


def test_a_full_disk_stops_the_log_file_only(capsys, monkeypatch):
    console = Console(enabled=True, log_file=Path("/dev/full"))
    console.say("one")
    console.say("two")
    printed = capsys.readouterr().out
    assert "train.log stopped" in printed and "two" in printed


def test_a_run_that_starts_over_keeps_the_old_numbers_aside(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"kind": "train", "step": 1}\n')
    MetricsFile(path, None).close()
    assert lines(path) == []
    assert lines(tmp_path / "m.jsonl.old") == [{"kind": "train", "step": 1}]
    path.write_text('{"kind": "train", "step": 2}\n')
    MetricsFile(path, None).close()
    assert lines(tmp_path / "m.jsonl.old") == [{"kind": "train", "step": 1}]
    assert lines(tmp_path / "m.jsonl.old.2") == [{"kind": "train", "step": 2}]


def test_what_a_host_that_went_down_left_in_the_file_is_not_read(tmp_path):
    path, line = tmp_path / "m.jsonl", b'{"kind": "eval", "step": 1}\n'
    path.write_bytes(line + b'{"kind": "eval"}\n[1]\n\0\0\xff\xfe\n' + line + b'{"kind": "ev')
    assert read_records(path) == 2 * [json.loads(line)]
    MetricsFile(path, 1).close()
    assert path.read_bytes() == 2 * line


def test_metrics_that_cannot_be_rewritten_stay_as_they_are(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text("".join(f'{{"kind": "train", "step": {step}}}\n' for step in range(100)))
    before = path.read_text()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**10, hard))  # as on a full disk
    try:
        for resume_step in (50, None):
            with pytest.raises(UsageError, match=r"m.jsonl.*: cannot be written \(File too large"):
                MetricsFile(path, resume_step)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [file.name for file in tmp_path.iterdir()] == ["m.jsonl"] and path.read_text() == before


def test_a_tracker_that_fails_does_not_stop_the_others(tmp_path):
    class Broken:
        name = "its.file"

        def log(self, record):
            raise OSError("disk full")

        def close(self):
            raise AssertionError("was dropped")

    said = []
    trackers = Trackers([Broken(), MetricsFile(tmp_path / "m.jsonl", None)], said.append)
    trackers.log({"step": 1})
    trackers.log({"step": 2})
    trackers.close()
    assert len(said) == 1 and "warning: its.file stopped: disk full" in said[0]
    assert [r["step"] for r in lines(tmp_path / "m.jsonl")] == [1, 2]


@pytest.mark.parametrize("resume_step", [None, 2])
def test_tensorboard_shows_no_step_twice(tmp_path, resume_step):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for value, start, resume in ((1.0, 1, None), (2.0, (resume_step or 0) + 1, resume_step)):
        tracker = TensorBoard(tmp_path, resume)
        for step in range(start, 5):
            tracker.log({"kind": "train", "step": step, "loss": value})
        tracker.close()
        time.sleep(1.1)  # files are ordered by their names, which hold the second
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    shown = [(e.step, e.value) for e in events.Scalars("train/loss")]
    kept = resume_step or 0
    assert shown == [(s, 1.0 if s <= kept else 2.0) for s in range(1, 5)]


def test_tensorboard_reads_what_was_written(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = TensorBoard(tmp_path, None)
    for step in (1, 2):
        tracker.log({"kind": "train", "step": step, "loss": 4.0 / step, "skipped": False})
    tracker.log({"kind": "eval", "step": 2, "val_loss": 1.5})
    tracker.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert events.Tags()["scalars"] == ["train/loss", "eval/val_loss"]
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 4.0), (2, 2.0)]


def test_rewinds_stay_whatever_is_dropped(tmp_path):
    path = tmp_path / "m.jsonl"
    records = [{"kind": "train", "step": s, "loss": 1.0} for s in range(1, 6)]
    records.append({"kind": "rewind", "step": 5, "spike": 9})
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    MetricsFile(path, 2).close()
    assert [(r["kind"], r["step"]) for r in lines(path)] == [
        ("train", 1), ("train", 2), ("rewind", 5),
    ]  # fmt: skip
    MetricsFile(path, None).close()
    assert [r["kind"] for r in lines(path)] == ["rewind"]
    assert len(lines(tmp_path / "m.jsonl.old")) == 3


def test_numbers_inside_of_records_are_shown_and_cleaned_too(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    corpora = {"web": {"tokens": 128, "loss": 2.5}, "code": {"tokens": 64, "loss": float("nan")}}
    record = {"kind": "train", "step": 1, "skipped": False, "corpora": corpora}
    file, board = MetricsFile(tmp_path / "m.jsonl", None), TensorBoard(tmp_path / "events", None)
    for tracker in (file, board):
        tracker.log(record)
        tracker.close()
    (found,) = lines(tmp_path / "m.jsonl")
    assert found["corpora"]["code"] == {"tokens": 64, "loss": None} and found["nonfinite"]
    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    assert [e.value for e in events.Scalars("train/corpora/web/loss")] == [2.5]
