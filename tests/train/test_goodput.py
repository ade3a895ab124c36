"""The account of a run's wall time over its starts, however each of them ended."""

import itertools
import json
import signal
import subprocess
import time

import pytest

from jaxgpt.tracking.records import GoodputRecord
from jaxgpt.train.reporting.goodput import Goodput, account, all_starts, read_starts
from jobs import SMALL, command, environment, records, run, train_here, wait_for_step


def start(began, ended, *stretches, **seconds):
    seconds = seconds | {"step": sum(stretch[2] for stretch in stretches)}
    return GoodputRecord(step=0, began=began, ended=ended, seconds=seconds, stretches=stretches)


def test_steps_that_a_later_stretch_begins_before_are_lost():
    starts = [
        start(0, 130, [0, 100, 100.0], start=30),  # saved at 80: 20 of 100 steps are lost, and then
        start(150, 250, [80, 130, 50.0], [90, 140, 50.0]),  # a rewind from 130 to 90: 40 of 50
        start(
            250, 275, [90, 90, 0.0], [70, 90, 20.0], restore=5
        ),  # 90 and 80 were damaged: 10 more
        start(275, 280, start=5),  # killed before a step
    ]
    found = account(starts)
    assert found["lost"] == pytest.approx(30 + 50 + 50)
    assert found["step"] == pytest.approx(70 + 20)
    assert found["down"] == 20
    assert sum(found.values()) == pytest.approx(280)


def test_starts_that_were_killed_before_they_could_log_are_passed_on(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    for began in (100.0, 200.0, 300.0):
        Goodput(began, tmp_path).close()
    assert [one.began for one in all_starts(tmp_path)] == [100.0, 200.0, 300.0]
    for spoiled in ("", "{}", "[1]", '[{"began": 1}]'):
        (tmp_path / "goodput.json").write_text(spoiled)
        assert read_starts(tmp_path / "goodput.json") == []


def test_every_moment_is_in_one_phase(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "time", lambda: 1000 + now[0])
    goodput = Goodput(995.0)  # five seconds ago
    goodput.go_on_from(10)
    for phase, seconds in (("step", 1), ("data", 2), ("step", 4), ("end", 8)):
        goodput.enter(phase)
        with goodput.within("save"):
            now[0] += 16
        now[0] += seconds
    goodput.reach(15)
    found = goodput.record()
    assert found.seconds == {"start": 5, "step": 5, "data": 2, "end": 8, "save": 64}
    assert found.stretches == [[10, 15, 5]]
    assert (found.began, found.ended) == (995, 1000 + now[0])


def end_of_start(out, how):
    """Start a run, and end it by a signal after some steps, or let it come to its end."""
    known = records(out) if (out / "metrics.jsonl").exists() else []
    steps = 20 + max((r["step"] for r in known), default=0)
    words = (*SMALL, "--out", out, "--mesh", "1,1,1", "checkpoint.interval=7")
    job = subprocess.Popen(
        command("train", *words, f"train.max_iters={1_000_000 if how else steps}"),
        stdout=subprocess.DEVNULL, env=environment(),
    )  # fmt: skip
    if how:
        wait_for_step(out, steps, job)
        job.send_signal(how)
    assert job.wait(120) == {None: 0, signal.SIGTERM: 75, signal.SIGKILL: -9}[how]


@pytest.mark.long
@pytest.mark.parametrize("n_starts", [2, 10])
def test_the_parts_add_up_to_the_time_on_the_wall(tmp_path, n_starts):
    ends = itertools.islice(itertools.cycle([signal.SIGKILL, signal.SIGTERM, None]), n_starts - 1)
    began = time.time()
    for how in (*ends, None):
        end_of_start(tmp_path, how)
    wall = time.time() - began
    starts = all_starts(tmp_path)
    assert len(starts) == n_starts
    whole = sum(account(starts).values())
    # A busy machine may let the last process go late: it matters where the whole is short.
    assert whole == pytest.approx(wall, rel=0.01, abs=1 if n_starts < 10 else 0)
    # metrics.jsonl alone tells it, too, but for what the last process did after its last line.
    assert [r["began"] for r in records(tmp_path, "goodput")] == [one.began for one in starts]
    log = (tmp_path / "train.log").read_text()
    assert f" % over {n_starts} starts: " in log
    table = run("report", "goodput", tmp_path).stdout
    assert f"starts: {n_starts}" in table and f"{whole:,.1f}" in table
    assert "the peaks of cpu are not known" in table


@pytest.mark.long
def test_the_time_of_a_step_stands_beside_that_of_its_plan(tmp_path):
    train_here(*SMALL, "--mesh", "1,2,1", "--out", tmp_path, "train.max_iters=3")
    facts = json.loads((tmp_path / "cluster.json").read_text())
    facts |= {"device_kind": "NVIDIA H100 80GB HBM3", "devices_per_process": 2}
    (tmp_path / "cluster.json").write_text(json.dumps(facts))
    layout = ("--device", "h100", "--devices-per-host", "2", "--mesh", "1,2,1")
    plan = run("plan", "--config", tmp_path / "config.yaml", *layout, "--json")
    step = json.loads(plan.stdout)["estimate"]["step"]
    assert f"plan predicts {1000 * step:.1f} ms" in run("report", "goodput", tmp_path).stdout
