"""`python -m jaxgpt.launch --restarts`: jobs that are killed, stopped, or lose a host."""

import json
import os
import random
import signal
import subprocess
import time

import pytest

import hosts
from jobs import (
    FIVE_AXES,
    SMALL,
    checkpoint_arrays,
    command,
    environment,
    process_of,
    records,
    run,
    wait_for_step,
)

SETTINGS = (*SMALL, "--mesh", "2,1,2", "train.eval_interval=20", "train.sample_tokens=4",
            "checkpoint.interval=10")  # fmt: skip


def launched(said, *options, train=(), **variables):
    """Start a job under a supervisor; it prints to the file `said`, as a pipe has no reader."""
    words = command("launch", *options, "--", *command("train", *train))
    with said.open("w") as file:
        return subprocess.Popen(
            words, stdout=file, stderr=subprocess.STDOUT, env=environment(**variables)
        )


def wait_for_log(job, out, words, seconds=120):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        log = out / "train.log"
        if log.exists() and words in log.read_text():
            return
        assert job.poll() is None
        time.sleep(0.1)
    raise TimeoutError(words)


def ranks(out, n):
    """Return the process IDs of a job by rank."""
    found = []
    for rank in range(n):
        try:
            found.append(process_of(out, rank))
        except LookupError:
            return None
    return found


@pytest.mark.parametrize(
    ("n", "settings"), [(2, ()), pytest.param(4, FIVE_AXES, marks=pytest.mark.long)]
)
def test_a_job_whose_processes_are_killed_ends_as_if_they_were_not(n, settings, tmp_path):
    whole, killed, steps = tmp_path / "whole", tmp_path / "killed", 60
    settings = (*SETTINGS, *settings, f"train.max_iters={steps}")
    job = run("train", *settings, "--out", whole, processes=n)
    assert job.returncode == 0, job.stdout
    train = (*settings, "--out", killed)
    job = launched(tmp_path / "said", "-n", n, "--restarts", 20, train=train)
    for number, rank in ((1, n - 1), (2, 0)):
        wait_for_log(job, killed, f"step={20 * number}/")
        os.kill(ranks(killed, n)[rank], signal.SIGKILL)
    assert job.wait(300) == 0
    output = (tmp_path / "said").read_text()
    assert "attempt 2 ended with status" in output and "attempt 3 ended" not in output
    assert_same(killed, whole, steps)


@pytest.mark.long
def test_a_job_that_is_killed_for_five_minutes_ends_as_if_it_were_not(tmp_path):
    """Kill a random process, or two on a host, every 20 to 40 s; print the time of each restart."""
    whole, killed, steps = tmp_path / "whole", tmp_path / "killed", 4500
    settings = (*SETTINGS, f"train.max_iters={steps}")
    train = (*settings, "--out", killed)
    job = launched(tmp_path / "said", "-n", 4, "--restarts", 50, train=train)
    draw, began, back = random.Random(0), time.monotonic(), []
    while job.poll() is None and time.monotonic() - began < 300:
        wait_for_step(killed, 1, job)
        time.sleep(draw.uniform(20, 40))
        victims = draw.choice([[0], [1], [2], [3], [0, 1], [2, 3]])
        if job.poll() is not None or (found := ranks(killed, 4)) is None:
            continue
        starts, now = len(records(killed, "start")), time.monotonic()
        for rank in victims:
            os.kill(found[rank], signal.SIGKILL)
        while len(records(killed, "start")) == starts or not stepped(killed):
            assert job.poll() is None and time.monotonic() - now < 120
            time.sleep(0.05)
        back.append(time.monotonic() - now)
    assert job.wait(900) == 0
    output = (tmp_path / "said").read_text()
    assert len(back) > 5 and output.count(" ended with status ") == len(back)
    print(f"{len(back)} kills; seconds from one to the next step: {sorted(back)}")
    job = run("train", *settings, "--out", whole, processes=4, timeout=900)
    assert job.returncode == 0, job.stdout
    assert_same(killed, whole, steps)


def stepped(out):
    """Return whether a step was logged after the last start."""
    found = [r["kind"] for r in map(json.loads, (out / "metrics.jsonl").open())]
    return "train" in found[len(found) - found[::-1].index("start") :]


def assert_same(killed, whole, steps):
    for kind in ("train", "eval", "sample"):
        figures = ("step", "loss", "grad_norm", "train_loss", "val_loss", "text")
        a, b = (
            [[r.get(name) for name in figures] for r in records(out, kind)]
            for out in (killed, whole)
        )
        assert a == b
    a, b = (checkpoint_arrays(out, steps) for out in (killed, whole))
    assert all((a[name] == b[name]).all() for name in b) and a.keys() == b.keys()
    assert (killed / "samples.txt").read_text() == (whole / "samples.txt").read_text()


@pytest.mark.long  # it waits 30 s between its tries
def test_it_gives_up_where_no_step_is_gained(tmp_path):
    train = (*SMALL, "--out", tmp_path / "run", "data.path=/dev/null")
    job = launched(tmp_path / "said", "-n", 2, "--restarts", 9, train=train)
    assert job.wait(60) == 2, "bad input would be as bad in another try"
    script = tmp_path / "fails.py"
    script.write_text("raise SystemExit(1)")
    words = command("launch", "-n", 2, "--restarts", 9, "--", *command(script))
    job = subprocess.run(words, capture_output=True, text=True, env=environment(), timeout=200)
    assert job.returncode == 1, job.stderr
    assert job.stderr.count("ended with status 1") == 3
    assert "--give-up-after 3: no new checkpoint" in job.stderr


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        *(pytest.param(s, marks=pytest.mark.long) for s in (signal.SIGINT, signal.SIGUSR1)),
    ],
)
def test_a_signal_stops_the_job_and_no_try_follows(number, tmp_path):
    train = (*SETTINGS, "train.max_iters=100000", "--out", tmp_path / "run")
    job = launched(tmp_path / "said", "-n", 2, "--restarts", 9, train=train)
    wait_for_log(job, tmp_path / "run", "step=10/")
    job.send_signal(number)
    assert job.wait(120) == 75
    output = (tmp_path / "said").read_text()
    assert "which is saved" in output and "ended with status" not in output


@pytest.mark.skipif(hosts.missing() is not None, reason=hosts.missing() or "")
@pytest.mark.long  # a minute passes before a host is given up
@pytest.mark.parametrize("spare", [1, 0])
def test_a_host_that_is_lost_is_left_out(spare, tmp_path):
    """A spare host replaces it. Without a spare host, the job continues on fewer hosts."""
    out, steps = tmp_path / "run", 3000
    with hosts.several_hosts(tmp_path, 2 + spare) as up:
        (tmp_path / "hostfile").write_text("".join(f"{host.name}\n" for host in up))
        train = (*SMALL, "--mesh", "-1,1,1", "--out", out, f"train.max_iters={steps}",
                 "checkpoint.interval=10", "train.hang_timeout=0.5")  # fmt: skip
        options = ("--hosts", tmp_path / "hostfile", "--ppn", 1, "--restarts", 3)
        options += ("--spare-nodes", spare) if spare else ()
        variables = {"HYDRA_LAUNCHER": "rsh", "HYDRA_LAUNCHER_EXEC": str(tmp_path / "rsh")}
        words = command("launch", *options, "--", *command("train", *train))
        said = tmp_path / "said"
        with said.open("w") as file:
            job = subprocess.Popen(
                up[0].command(*words), stdout=file, stderr=subprocess.STDOUT,
                env=environment(**variables),
            )  # fmt: skip
        wait_for_log(job, out, "step=20/")
        up[1].lose()
        wait_for_log(job, out, "resumed from step")
        job.send_signal(signal.SIGTERM)
        job.wait(60)
    output = said.read_text()
    assert job.returncode == 75, output
    assert "launch: excluding host beta: " in output
    assert ("no spare host is left" in output) == (spare == 0)
    facts = json.loads((out / "cluster.json").read_text())
    assert facts["hosts"] == (["alpha", "gamma"] if spare else ["alpha"])
