"""The destinations of records, and how they handle failures."""

import contextlib
import functools
import json
import os
import platform
import resource
import socket
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from jaxgpt.cluster.environment import JOB, SUPERVISOR
from jaxgpt.config import UsageError, load_config
from jaxgpt.tracking import TRACKERS, Trackers, check_trackers
from jaxgpt.tracking.appended_file import LIMIT as MAX_WAITING
from jaxgpt.tracking.appended_file import AppendedFile
from jaxgpt.tracking.background import ATTEMPTS, LIMIT, BackgroundTracker
from jaxgpt.tracking.console import Console
from jaxgpt.tracking.csv import read_table, write_table
from jaxgpt.tracking.curves import curves
from jaxgpt.tracking.jsonl import JsonLines, read_records
from jaxgpt.tracking.records import (
    CheckpointRecord,
    EvalRecord,
    GoodputRecord,
    SampleRecord,
    TrainRecord,
)
from jaxgpt.tracking.run_files import RunFiles, read_runs
from jaxgpt.tracking.supervisor import SupervisorLink
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
    assert curves(first) == {"train/lr": 0.1, "data/consumed_tokens": 0}


def test_a_resumed_file_holds_no_step_twice(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = opened(JsonLines(), tmp_path)
    for step in range(1, 8):
        file.log(trained(step))
    file.close()
    with path.open("a") as f:
        f.write('{"kind": "eval", "step": null}\n')  # written by another program
        f.write('{"kind": "train", "st')  # killed while writing
    file = opened(JsonLines(), tmp_path, 4)
    file.log(trained(5))
    file.close()
    assert [r["step"] for r in lines(path)] == [1, 2, 3, 4, 5]


def test_train_log_gets_its_lines_once_the_disk_has_room_again(tmp_path, capsys):
    console = Console(tmp_path / "train.log", prints=True)
    console.info("one")
    with full_disk((tmp_path / "train.log").stat().st_size + 5):
        console.info("two")
        console.info("three")
    console.info("four")
    console.close()
    printed = capsys.readouterr().out.splitlines()
    warning = "warning: train.log failed: File too large; 1 line is waiting to be written; "
    assert printed == ["one", "two", f"{warning}retrying with the next line", "three", "four"]
    written = [line[20:] for line in (tmp_path / "train.log").read_text().splitlines()]
    assert written == printed


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
    with full_disk(2**10):
        for resume_step in (50, None):
            with pytest.raises(
                UsageError, match=r"metrics.jsonl.*: cannot be written \(File too large"
            ):
                opened(JsonLines(), tmp_path, resume_step)
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


class Server:
    """A tracker whose server can be down; `heard` has the calls that it received."""

    def __init__(self):
        self.is_down, self.heard = False, []

    def _call(self, *call):
        if self.is_down:
            raise OSError("no route to host")
        self.heard.append(call)

    def open(self, run, resume_step):
        self._call("open", resume_step)

    def log(self, record):
        self._call("log", record.step)

    def rewind(self, step):
        self._call("rewind", step)

    def close(self):
        self._call("close")


class Hangs(Server):
    """A tracker whose server does not answer."""

    def log(self, record):
        threading.Event().wait()


def trackers_with(server, directory, monkeypatch):
    """Return all trackers of a run, one of them with a server, and the list of their warnings."""
    monkeypatch.setitem(TRACKERS, "hosted", lambda: server)
    said = []
    return Trackers(run_in(directory, "hosted"), None, said.append), said


def spent_time(step):
    times = {"start": 0.0, "began": 0.0, "ended": 1.0, "seconds": {"train": 1.0}}
    return GoodputRecord(step=step, after=0, is_last=False, **times)


def wait_until(is_true):
    for _ in range(1000):
        if is_true():
            return
        time.sleep(0.01)
    raise AssertionError("it did not happen within 10 s")


def test_a_tracker_that_fails_for_a_while_gets_every_record_and_causes_one_warning(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("jaxgpt.tracking.background.PAUSE", 0.01)
    server = Server()
    trackers, said = trackers_with(server, tmp_path, monkeypatch)
    background = trackers._all["train.trackers=hosted"]
    for step in range(1, 6):
        trackers.log(trained(step))
        wait_until(lambda: not background._todo.qsize())
    server.is_down = True
    trackers.log(trained(6))
    wait_until(lambda: background._error is not None)
    trackers.log(trained(7))
    trackers.rewind(4)
    trackers.log(spent_time(5))  # is not sent, so shows nothing
    trackers.log(trained(5))
    server.is_down = False
    wait_until(lambda: background._error is None)
    trackers.log(trained(6))
    trackers.close()
    assert said == [
        "warning: train.trackers=hosted failed: no route to host; it will be retried",
        "train.trackers=hosted works again",
    ]
    steps = [("log", step) for step in range(1, 8)]
    again = [("rewind", 4), ("log", 5), ("log", 6)]
    assert server.heard == [("open", None), *steps, *again, ("close",)]
    kept = [r["step"] for r in lines(tmp_path / "metrics.jsonl") if r["kind"] == "train"]
    assert kept == list(range(1, 7))


def test_a_record_that_always_fails_is_dropped_but_a_rewind_never_is(monkeypatch):
    class Refuses(Server):
        def log(self, record):
            if record.step == 1:
                raise ValueError("bad record")
            super().log(record)

        def rewind(self, step):
            self.tries = getattr(self, "tries", 0) + 1
            if self.tries < 2 * ATTEMPTS:
                raise OSError("no route to host")
            super().rewind(step)

    monkeypatch.setattr("jaxgpt.tracking.background.PAUSE", 0.0)
    server = Refuses()
    tracker = BackgroundTracker(server)
    tracker.open(None, None)
    for call in (lambda: tracker.log(trained(1)), lambda: tracker.rewind(0)):
        with contextlib.suppress(OSError, ValueError):  # errors of earlier calls
            call()
    wait_until(lambda: server.heard[-1:] == [("rewind", 0)])
    tracker.log(trained(2))
    with pytest.raises(OSError, match="it lost 1 record"):
        tracker.close()
    assert server.heard == [("open", None), ("rewind", 0), ("log", 2), ("close",)]


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (lambda r: 1 / (r.step - r.step), "division by zero"),
        (lambda _: {}["lss"], "KeyError: 'lss'"),
    ],
)
def test_a_mistake_in_a_tracker_is_located(monkeypatch, tmp_path, mistake, words):
    class Broken(Server):
        log = staticmethod(mistake)

    trackers, said = trackers_with(Broken(), tmp_path, monkeypatch)
    trackers.log(trained(1))
    wait_until(lambda: trackers._all["train.trackers=hosted"]._error is not None)
    trackers.log(trained(2))
    trackers.close()
    line = mistake.__code__.co_firstlineno
    assert f"failed: {words} (test_trackers.py, line {line}); it will be retried" in said[0]
    assert said[-1].endswith("it lost 2 records; its output is incomplete")


def test_a_failing_tracker_does_not_keep_a_run_from_ending():
    server = Server()
    server.is_down = True
    tracker = BackgroundTracker(server)
    tracker.open(None, None)
    wait_until(lambda: tracker._error)
    began = time.monotonic()
    with pytest.raises(OSError, match="no route"):
        tracker.close()
    assert time.monotonic() - began < 5 and server.heard == []


def test_a_tracker_that_hangs_stops_no_other(tmp_path, monkeypatch):
    close = functools.partialmethod(BackgroundTracker.close, seconds=0.1)
    monkeypatch.setattr(BackgroundTracker, "close", close)
    trackers, said = trackers_with(Hangs(), tmp_path, monkeypatch)
    n_steps = LIMIT + 10
    for step in range(1, n_steps + 1):
        trackers.log(trained(step))
    trackers.close()
    failed = "warning: train.trackers=hosted failed: it "
    assert said == [
        f"{failed}is {LIMIT} records behind; new records are dropped",
        f"{failed}has not finished after 0.1 s; its output is incomplete",
    ]
    assert len(lines(tmp_path / "metrics.jsonl")) == n_steps


@contextlib.contextmanager
def full_disk(room):
    """Limit the size of files, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("rewind_to", [None, 10, 42])
def test_no_record_is_lost_while_the_disk_is_full(tmp_path, rewind_to):
    path, said = tmp_path / "metrics.jsonl", []
    trackers = Trackers(run_in(tmp_path), None, said.append)
    for step in range(1, 21):
        trackers.log(trained(step))
    with full_disk(path.stat().st_size + 30):  # room for half a line
        for step in range(21, 51):
            trackers.log(trained(step))
        assert [r["step"] for r in lines(path)] == list(range(1, 21))
        if rewind_to is not None:
            trackers.rewind(rewind_to)
            trackers.log(trained(rewind_to + 1))
    first = 51 if rewind_to is None else rewind_to + 2
    for step in range(first, 61):
        trackers.log(trained(step))
    trackers.close()
    assert [r["step"] for r in lines(path)] == list(range(1, 61))
    assert said[0] == (
        "warning: metrics.jsonl failed: File too large; 1 line is waiting to be written; it will "
        "be retried"
    )
    assert said[1:] == ["metrics.jsonl works again"]


def test_records_without_a_sample_do_not_hide_that_samples_cannot_be_written(tmp_path):
    said = []
    trackers = Trackers(run_in(tmp_path), None, said.append)
    samples = tmp_path / "samples.txt"
    trackers._all.pop("metrics.jsonl").close()
    with full_disk(samples.stat().st_size + 30):
        for step in range(1, 6):
            trackers.log(SampleRecord(step=step, text=50 * "x"))
            trackers.log(trained(step))
        assert len(said) == 1
    trackers.log(trained(6))
    trackers.close()
    assert said[1:] == ["samples.txt works again"]
    assert samples.read_text().count("--- step") == 5


def test_a_disk_that_stays_full_is_named_at_the_end(tmp_path):
    said = []
    trackers = Trackers(run_in(tmp_path), None, said.append)
    with full_disk(10):
        trackers.log(trained(1))
        trackers.log(trained(2))
        trackers.close()
    assert said[-1] == (
        "warning: metrics.jsonl failed: File too large; 2 lines are waiting to be written; its "
        "output is incomplete"
    )
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_only_so_many_lines_wait(tmp_path):
    file = AppendedFile(tmp_path / "folder" / "file")
    for i in range(MAX_WAITING + 5):
        with pytest.raises(OSError, match="No such file or directory; .* to be written"):
            file.write(f"{i}\n")
    (tmp_path / "folder").mkdir()
    file.close()
    found = (tmp_path / "folder" / "file").read_text().split()
    assert list(map(int, found)) == list(range(5, MAX_WAITING + 5))


def test_samples_are_written_once_the_disk_has_room_again(tmp_path):
    said = []
    trackers = Trackers(run_in(tmp_path), None, said.append)
    with full_disk(0):
        trackers.log(SampleRecord(step=1, text="one"))
    trackers.log(SampleRecord(step=2, text="two"))
    trackers.close()
    assert (tmp_path / "samples.txt").read_text() == "--- step 1\none\n--- step 2\ntwo\n"
    assert len(said) == 4  # two each about metrics.jsonl and samples.txt


def test_the_end_of_a_run_waits_for_a_tracker_only_so_long():
    tracker = BackgroundTracker(Hangs())
    tracker.log(trained(1))
    with pytest.raises(TimeoutError, match="it has not finished after 0 s"):
        tracker.close(seconds=0)


def test_tensorboard_goes_on_once_the_disk_has_room_again(tmp_path):
    tracker = opened(TensorBoard(), tmp_path)

    def evaluated(step):
        tracker.log(EvalRecord(step=step, train_loss=1.0, val_loss=1.0))

    evaluated(1)
    tracker.log(trained(2, loss=1.0))
    tracker.log(trained(3, loss=1.0))
    with full_disk(0):
        for _ in range(2):
            with pytest.raises(OSError, match="File too large"):
                evaluated(3)
    evaluated(3)
    tracker.log(trained(4, loss=1.0))
    tracker.close()
    events = events_of(tmp_path)
    assert [e.step for e in events.Scalars("eval/val_loss")] == [1, 3]
    assert [e.step for e in events.Scalars("train/loss")] == [2, 3, 4]


def test_the_link_to_the_supervisor_connects_again(tmp_path, monkeypatch):
    with socket.create_server(("localhost", 0)) as server:
        monkeypatch.setenv(SUPERVISOR, f"localhost:{server.getsockname()[1]}")
        monkeypatch.setenv(JOB, "job")
        link = opened(SupervisorLink(), tmp_path)
        link._connection.shutdown(socket.SHUT_RDWR)  # as if the network had failed
        with pytest.raises(OSError, match="."):
            link.log(trained(1))
        link.log(trained(2))
        link.close()
        link._connection.close()
        first, second = server.accept()[0], server.accept()[0]
        with first, second, first.makefile() as a, second.makefile() as b:
            steps = [[json.loads(line)["step"] for line in messages] for messages in (a, b)]
    assert steps == [[0], [2, 2]]


def test_the_supervisor_hears_of_the_newest_checkpoint(tmp_path, monkeypatch):
    with socket.create_server(("localhost", 0)) as server:
        monkeypatch.setenv(SUPERVISOR, f"localhost:{server.getsockname()[1]}")
        monkeypatch.setenv(JOB, "job")
        link = opened(SupervisorLink(), tmp_path, resume_step=2)
        link.log(trained(5))
        link.log(CheckpointRecord(step=4, path="run/checkpoints/4", stalled=0.1, seconds=1.0))
        link.rewind(3)
        link._connection.close()
        with server.accept()[0] as connection, connection.makefile() as messages:
            told = [(m["step"], m["saved"]) for m in map(json.loads, messages)]
    assert told == [(2, 2), (5, 2), (5, 4), (3, 3)]


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
    assert [e.value for e in events_of(tmp_path).Scalars("data/web/loss")] == [2.5]


def test_a_csv_file_with_a_long_sample_is_read_again(tmp_path):
    rows = [{"step": "5", "text": 200_000 * "a"}]
    write_table(tmp_path / "sample.csv", ["step", "text"], rows)
    assert read_table(tmp_path / "sample.csv") == (["step", "text"], rows)


def test_a_row_with_too_many_values_is_dropped_from_a_csv_file(tmp_path):
    (tmp_path / "eval.csv").write_text("step,loss\n1,2.5\n2,2.42,2.4\n3,2.3\n")
    columns, rows = read_table(tmp_path / "eval.csv")
    assert columns == ["step", "loss"] and [row["step"] for row in rows] == ["1", "3"]


def test_a_csv_file_with_a_damaged_header_is_started_again(tmp_path):
    (tmp_path / "eval.csv").write_text("stdp,loss\n1,2.5\n")
    assert read_table(tmp_path / "eval.csv") == ([], [])


def test_a_text_that_is_cut_off_is_dropped_from_a_csv_file(tmp_path):
    (tmp_path / "sample.csv").write_bytes(b'step,text\r\n5,whole\r\n6,"alpha, beta\ngam')
    assert read_table(tmp_path / "sample.csv")[1] == [{"step": "5", "text": "whole"}]


def test_a_run_whose_lock_cannot_be_checked_is_running_if_it_wrote_recently(tmp_path, monkeypatch):
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / ".lock").write_text(f"process 1 on host {platform.node()}\n")
    assert RunFiles(tmp_path, "run").state() == "dead"
    with monkeypatch.context() as patch:
        patch.setattr(sys, "platform", "darwin")
        assert RunFiles(tmp_path, "run").state() == "running"
    (tmp_path / ".lock").write_text(f"process 1 on host {platform.node()}2\n")
    assert RunFiles(tmp_path, "run").state() == "running"
    ahead = time.time() + 60  # the clock of a file server
    for file in tmp_path.iterdir():
        os.utime(file, (ahead, ahead))
    assert RunFiles(tmp_path, "run").age() == 0


def test_a_folder_that_cannot_be_looked_up_is_no_run(tmp_path):
    with pytest.raises(UsageError, match="is not a folder; give the --out of a run"):
        read_runs([tmp_path / (300 * "x")])


@pytest.mark.parametrize("text", ["train: !!int ''\n", "train: {", 5000 * "["])
def test_a_damaged_config_file_has_no_settings(tmp_path, text):
    (tmp_path / "config.yaml").write_text(text)
    assert RunFiles(tmp_path, "run").settings() == {}
