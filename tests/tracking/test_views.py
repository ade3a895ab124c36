"""What each tracker shows of a run that was resumed and rewound, read with its own reader."""

import csv
import json
import os
import shutil
import sqlite3
import struct
import subprocess
import sys
import threading
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxgpt.config import UsageError, load_config
from jaxgpt.tracking import TRACKERS, Trackers, check_trackers
from jaxgpt.tracking.records import (
    CheckpointRecord,
    EvalRecord,
    GoodputRecord,
    SampleRecord,
    StartupRecord,
    TrainRecord,
)
from jaxgpt.tracking.wandb import Wandb
from wandb_server import WandbServer

# What metrics.jsonl calls a number, and its tag.
TAGS = {
    "loss": "train/loss",
    "dt": "throughput/dt",
    "memory_bytes": "memory/bytes",
    "consumed_tokens": "data/consumed_tokens",
    "val_loss": "eval/val_loss",
}


def write_run(directory, *trackers):
    """Write a run that is resumed three times and rewound once, with other numbers each time."""
    directory.mkdir()
    said = []
    for attempt, (resume_step, last) in enumerate([(None, 12), (8, 20), (16, 24), (24, 30)]):
        found = open_trackers(directory, trackers, resume_step, said.append)
        train(found, attempt, resume_step or 0, last)
        if attempt == 1:
            found.rewind(12)
            train(found, 10, 12, 18)
        found.close()
    assert said == []


def open_trackers(directory, names, resume_step=None, say=print):
    config = load_config("tiny").replace(train__trackers=names, train__tracker_group="sweep")
    return Trackers(SimpleNamespace(directory=directory, config=config), resume_step, say)


def train(trackers, attempt, after, last):
    for step in range(after + 1, last + 1):
        values = {"loss": 4.0 / step + attempt, "dt": 0.03, "memory_bytes": 1000.0}
        trackers.log(TrainRecord(step=step, values=values, consumed_tokens=64 * step))
        if step % 4 == 0:
            trackers.log(EvalRecord(step=step, train_loss=1.0, val_loss=2.0 / step + attempt))
            trackers.log(SampleRecord(step=step, text=f"after {step} steps: <b>, Grüße"))
            times = {"start": 0.0, "began": 0.0, "ended": 4.0, "is_last": False}
            seconds = {"step": 3.0, "save": 1.0}
            trackers.log(GoodputRecord(step=step, after=0, seconds=seconds, **times))
        if step % 4 == 2 and step - 2 > after:  # two steps late
            folder = f"checkpoints/{step - 2}"
            trackers.log(CheckpointRecord(step=step - 2, path=folder, stalled=0.1, seconds=1.0))


def curves_of(directory):
    """Return the points of each curve in metrics.jsonl: lists of (step, value)."""
    out = defaultdict(list)
    for record in map(json.loads, (directory / "metrics.jsonl").read_text().splitlines()):
        for name, tag in TAGS.items():
            if name in record:
                out[tag].append((record["step"], record[name]))
    return dict(out)


def tensorboard_of(directory):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory / "tensorboard"))
    events.Reload()
    return events


def wandb_records(path):
    """Yield the records of a .wandb file, which is a LevelDB log of W&B's protocol buffers."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, record, block = path.read_bytes(), 7, b"", 2**15
    while at + 7 <= len(data):
        if block - at % block < 7:  # too small for a header
            at += block - at % block
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        record += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            yield Record.FromString(record)
            record = b""


def wandb_curves(directory):
    """Return the points of each curve, and the IDs of the runs, as `wandb sync` uploads them."""
    rows, ids = {}, set()
    parts = [list(wandb_records(path)) for path in directory.glob("wandb/offline-run-*/*.wandb")]
    for part in sorted(filter(None, parts), key=started):  # a killed process may leave none
        for record in part:
            if record.HasField("run"):
                ids.add(record.run.run_id)
                last = -1  # this part starts a new run
                if record.run.HasField("branch_point"):
                    assert record.run.branch_point.run == record.run.run_id
                    last = record.run.branch_point.value
                rows = {step: row for step, row in rows.items() if step <= last}
            elif record.HasField("history"):
                items = record.history.item
                row = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items}
                rows.setdefault(int(row["_step"]), {}).update(row)
    return points_of(rows), ids


def points_of(rows):
    """Return the points of each curve in the rows of a W&B run, a dict from step to row."""
    out = defaultdict(list)
    for step, row in rows.items():
        for tag in TAGS.values():
            if tag in row:
                out[tag].append((row.get(f"{tag.partition('/')[0]}/at_step", step), row[tag]))
    return dict(out)


def started(part):
    (run,) = [record.run for record in part if record.HasField("run")]
    return run.start_time.ToNanoseconds()


def test_tensorboard_shows_one_curve_for_each_tag(tmp_path):
    write_run(tmp_path / "run", "tensorboard")
    events = tensorboard_of(tmp_path / "run")
    expected = curves_of(tmp_path / "run")
    for tag, points in expected.items():
        found = [(e.step, e.value) for e in events.Scalars(tag)]
        assert found == [(step, pytest.approx(value, rel=1e-6)) for step, value in points]
    groups = {tag.partition("/")[0] for tag in events.Tags()["scalars"]}
    assert groups == {"train", "throughput", "memory", "data", "eval", "goodput"}
    assert [e.value for e in events.Scalars("goodput/step")] == [0.75] * 7
    checkpoints = [e.step for e in events.Scalars("goodput/checkpoint_seconds")]
    assert checkpoints == sorted(set(checkpoints))


def test_csv_files_hold_what_metrics_jsonl_holds(tmp_path):
    write_run(tmp_path / "run", "csv")
    expected, found = curves_of(tmp_path / "run"), {}
    for kind in ("train", "eval"):
        with (tmp_path / "run" / "csv" / f"{kind}.csv").open(newline="") as file:
            for row in csv.DictReader(file):
                for name in TAGS.keys() & row.keys():
                    point = int(row["step"]), float(row[name])
                    found.setdefault(TAGS[name], []).append(point)
    assert found == expected
    with (tmp_path / "run" / "csv" / "sample.csv").open(newline="") as file:
        assert next(csv.DictReader(file))["text"] == "after 4 steps: <b>, Grüße"


def test_pandas_reads_the_csv_files(tmp_path):
    pandas = pytest.importorskip("pandas")
    write_run(tmp_path / "run", "csv")
    table = pandas.read_csv(tmp_path / "run" / "csv" / "train.csv")
    assert table["step"].is_monotonic_increasing and table["step"].is_unique
    assert (
        list(zip(table["step"], table["loss"], strict=True))
        == (curves_of(tmp_path / "run")["train/loss"])
    )


def test_a_csv_file_gains_a_column_and_loses_a_row_that_was_cut_off(tmp_path):
    (tmp_path / "csv").mkdir()
    (tmp_path / "csv" / "train.csv").write_text("step,loss\n1,4.0\n2,3.0\n3,2.12")
    tracker = TRACKERS["csv"]()
    tracker.open(SimpleNamespace(directory=tmp_path), 3)
    tracker.log(TrainRecord(step=3, values={"loss": float("nan"), "mfu": 0.5}, consumed_tokens=9))
    tracker.close()
    assert (tmp_path / "csv" / "train.csv").read_text().splitlines() == [
        "step,loss,mfu,consumed_tokens,skipped",
        "1,4.0,,,",
        "2,3.0,,,",
        "3,nan,0.5,9,False",
    ]


def test_a_new_wandb_run_has_the_evaluation_before_step_1(tmp_path, monkeypatch):
    """With the file format of `wandb`, but without the package: a process died offline."""
    logged = []
    wandb_run = SimpleNamespace(
        id="abc", url=None, define_metric=lambda *a, **k: None,
        log=lambda values, step: logged.append(step),
    )  # fmt: skip
    settings = SimpleNamespace(settings=SimpleNamespace(mode="offline"))
    fake = SimpleNamespace(
        Settings=dict, setup=lambda _: settings, init=lambda **k: wandb_run, Html=str
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)
    records = [{"kind": "eval", "step": 0, "train_loss": 4.0, "val_loss": 4.1}]
    records += [{"kind": "train", "step": 1, "loss": 3.0, "skipped": False}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    Wandb().open(SimpleNamespace(directory=tmp_path, config=load_config("tiny")), 1)
    assert logged == [0, 1]


def test_wandb_continues_the_same_run(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    write_run(tmp_path / "run", "wandb")
    wandb.teardown()  # waits until W&B's process has written its files
    found, ids = wandb_curves(tmp_path / "run")
    assert found == curves_of(tmp_path / "run")
    assert len(ids) == 1


@pytest.mark.parametrize("killed", ["first", "second"])
def test_wandb_has_every_step_of_a_process_that_was_killed(tmp_path, monkeypatch, killed):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    start = None
    if killed == "second":
        trackers, start = open_trackers(tmp_path, ("wandb",)), 4
        train(trackers, 0, 0, 6)
        trackers.close()
        wandb.teardown()  # otherwise, the next process would share W&B's process with this one
    code = f"""
import os, pathlib, signal, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import test_views
trackers = test_views.open_trackers(pathlib.Path({str(tmp_path)!r}), ("wandb",), {start})
test_views.train(trackers, 1, {start or 0}, 12)
background = trackers._all["train.trackers=wandb"]
while background._todo.qsize():
    pass
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", code], check=False)
    trackers = open_trackers(tmp_path, ("wandb",), 8)
    train(trackers, 2, 8, 16)
    trackers.close()
    wandb.teardown()
    found, _ = wandb_curves(tmp_path)
    assert found == curves_of(tmp_path)


@pytest.fixture
def server(monkeypatch):
    wandb = pytest.importorskip("wandb")
    with WandbServer() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.server_address[1]}")
        monkeypatch.setenv("WANDB_API_KEY", 40 * "a")
        yield server
        wandb.teardown()
        server.shutdown()


def uploaded(server):
    """Return the points of each curve of the server's only run."""
    (rows,) = server.runs.values()
    return points_of({row["_step"]: row for row in rows})


def test_wandb_sync_uploads_a_run_that_was_resumed_and_rewound(server, tmp_path, monkeypatch):
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    write_run(tmp_path / "run", "wandb")
    wandb.teardown()
    monkeypatch.delenv("WANDB_MODE")
    parts = sorted((tmp_path / "run" / "wandb").glob("offline-run-*"))
    command = shutil.which("wandb", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    subprocess.run([command, "sync", *parts], check=True, capture_output=True, cwd=tmp_path)
    assert uploaded(server) == curves_of(tmp_path / "run")


@pytest.mark.long
def test_wandb_continues_after_its_server_was_down(server, tmp_path, monkeypatch):
    import wandb

    monkeypatch.setenv("WANDB_MODE", "online")
    said, warned = [], threading.Event()

    def say(line):
        said.append(line)
        warned.set()

    server.is_down = True
    trackers, step = open_trackers(tmp_path, ("wandb",), say=say), 0
    while not warned.wait(0.1):
        train(trackers, 0, step, step + 1)
        step += 1
    server.is_down = False
    while len(said) < 2:
        train(trackers, 0, step, step + 1)
        step += 1
        warned.clear()
        warned.wait(0.1)
    trackers.close()
    wandb.teardown()
    name = "train.trackers=wandb"
    assert said[0].startswith(f"warning: {name} failed: ")
    assert said[0].endswith("it will be retried")
    assert said[1:] == [f"{name} works again"]
    assert server.n_refused and uploaded(server) == curves_of(tmp_path)


def test_trackio_s_database_has_one_row_for_each_record(tmp_path, monkeypatch):
    pytest.importorskip("trackio")
    from trackio import sqlite_storage

    monkeypatch.setattr(sqlite_storage, "TRACKIO_DIR", tmp_path / "trackio")
    write_run(tmp_path / "run", "trackio")
    found = defaultdict(list)
    with sqlite3.connect(tmp_path / "trackio" / "jaxgpt.db") as database:
        rows = database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id")
        for name, step, metrics in rows:
            assert name == "run"
            for tag, value in json.loads(metrics).items():
                found[tag].append((step, value))
    expected = curves_of(tmp_path / "run")
    assert {tag: found[tag] for tag in expected} == expected
    config = sqlite_storage.SQLiteStorage.get_run_config("jaxgpt", "run")
    assert config["model.n_layer"] == 3 and config["_Group"] == "sweep"


def test_tensorboard_has_settings_start_up_times_and_samples(tmp_path):
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    write_run(tmp_path / "run", "tensorboard")
    events = tensorboard_of(tmp_path / "run")
    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    found = HParamsPluginData.FromString(content).session_start_info.hparams
    assert found["model.n_layer"].number_value == 3  # configs/tiny.yaml
    assert found["optimizer.name"].string_value == "adamw"
    sample = events.Tensors("sample/text_summary")[0]
    assert sample.step == 4
    assert sample.tensor_proto.string_val[0].decode() == "after 4 steps: <b>, Grüße"


def test_start_up_times_are_one_table_and_no_curves(tmp_path):
    tracker = TRACKERS["tensorboard"]()
    config = load_config("tiny")
    tracker.open(SimpleNamespace(directory=tmp_path, config=config), None)
    values = {"processes": 2, "compile_min": 1.5, "compile_mean": 2.0, "compile_max": 2.5}
    tracker.log(StartupRecord(step=1, values=values | {"compile_slowest_rank": 12345}))
    tracker.close()
    events = tensorboard_of(tmp_path)
    assert events.Tags()["scalars"] == []
    (text,) = events.Tensors("startup/text_summary")
    table = text.tensor_proto.string_val[0].decode()
    assert table.splitlines()[2:] == ["| compile | 1.5 | 2 | 2.5 | 12345 |"]


def test_a_tracker_without_its_package_is_refused_with_the_fix(monkeypatch, tmp_path):
    (tmp_path / "wandb").mkdir()  # wandb writes to such a folder
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for name in ("wandb", "trackio"):
        match = rf"train.trackers={name}: .* pip install 'jaxgpt\[{name}\]'"
        with pytest.raises(UsageError, match=match):
            check_trackers([name])
    check_trackers(["tensorboard", "csv"])


def test_packages_of_trackers_are_imported_only_on_request(tmp_path):
    code = (
        "import sys, jaxgpt.tracking as t; t.check_trackers(['csv', 'tensorboard']);"
        "print({'wandb', 'trackio', 'tensorboardX'} & sys.modules.keys())"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, env=os.environ)
    assert found.stdout.decode().strip() == "set()"
