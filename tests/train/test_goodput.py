"""Goodput accounts for a run's wall time over all its starts, however each of them ended."""

import itertools
import signal
import subprocess
import time

import pytest

from jaxgpt.perf.clock import Clock
from jaxgpt.tracking.records import GoodputRecord
from jaxgpt.train.reporting.goodput import Goodput, account, goodput_line, read_goodput
from jobs import SMALL, command, environment, records, run, wait_for_step


def record(began, ended, after, last, is_last=False, start=None, **seconds):
    return GoodputRecord(
        step=last, after=after, start=began if start is None else start, began=began, ended=ended,
        seconds=seconds, is_last=is_last,
    )  # fmt: skip


def test_steps_that_a_later_record_begins_before_are_lost():
    found = account(
        [
            record(0, 130, 0, 100, compile=30, step=100),  # saved at 80: 20 of 100 steps are lost
            record(150, 200, 80, 130, step=50),
            record(200, 250, 90, 140, start=150, step=50),  # a rewind from 130 to 90: 40 of 50
            # Checkpoints 90 and 80 were damaged: 10 steps more.
            record(250, 275, 70, 90, start=150, step=20, state=5),
            record(275, 280, 90, 90, imports=5),  # killed before a step
        ]
    )
    assert found["lost"] == pytest.approx(30 + 50 + 50)
    assert found["step"] == pytest.approx(70 + 20)
    assert found["down"] == 20
    assert sum(found.values()) == pytest.approx(280)


def test_the_time_after_a_kill_is_lost_and_the_pause_after_a_clean_stop_is_not():
    starts = [
        record(0, 50, 0, 40, imports=10, step=40),
        record(50, 60, 40, 50, start=0, step=10),  # then killed
        record(100, 130, 50, 80, step=30, is_last=True),  # then stopped, and started the next day
        record(90_000, 90_010, 80, 90, step=10, is_last=True),
    ]
    found = account(starts)
    assert found["down"] == 40 and found["lost"] == 0 and found["step"] == 90
    assert sum(found.values()) == 60 + 40 + 30 + 10
    assert goodput_line(starts).startswith("goodput 64.3 % over 3 starts: step 90.0 s, down 40.0 s")


def test_records_follow_each_other_without_a_gap_and_rarely(monkeypatch):
    now, found = [0.0], []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    clock = Clock(time.time() - 2)
    goodput = Goodput(clock, 40, found.append)
    goodput.continue_from(10)  # checkpoint 40 was damaged
    clock.enter("step")
    for step in range(11, 30_011):
        now[0] += 1
        goodput.reach(step)
    goodput.continue_from(20_000)
    with clock.within("save"):
        now[0] += 1
    goodput.write(is_last=True)
    assert [(r.after, r.step) for r in found[:3]] == [(40, 40), (10, 16), (16, 22)]
    assert [(r.after, r.step) for r in found[-2:]] == [(found[-3].step, 30_010), (20_000, 20_000)]
    assert found[0].began == clock.began and found[0].seconds == {
        "imports": pytest.approx(2, abs=0.1)
    }
    assert found[-1].seconds == {"save": pytest.approx(1)}
    assert all(before.ended == after.began for before, after in itertools.pairwise(found))
    assert all(sum(r.seconds.values()) == pytest.approx(r.ended - r.began) for r in found)
    # Every 5 s, or every thousandth of the start: 5,000 / 6 + 1,000 log(30,000 / 5,000).
    assert len(found) == pytest.approx(2_600, rel=0.1)
    assert max(r.ended - r.began for r in found) < 32
    assert [r.is_last for r in found[-2:]] == [False, True]


def end_of_start(out, how):
    """Start a run, then stop it with the signal `how` after 20 steps, or let it finish."""
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
    began, paused = time.time(), 0.0
    for how in (*ends, None):
        end_of_start(tmp_path, how)
        time.sleep(1)
        if how != signal.SIGKILL:
            paused += time.time() - read_goodput(tmp_path)[-1].ended
    wall = time.time() - began - paused
    found = read_goodput(tmp_path)
    total = account(found)
    whole = sum(total.values())
    assert whole == pytest.approx(wall, rel=0.01)
    assert total["down"] > len(range(0, n_starts - 1, 3))  # a second after each kill
    log = (tmp_path / "train.log").read_text()
    assert f" % over {n_starts} starts: " in log
    table = run("report", "goodput", tmp_path).stdout
    assert f"starts: {n_starts}" in table and f"{whole:,.1f}" in table
