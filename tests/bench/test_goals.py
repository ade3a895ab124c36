import contextlib
import json
import math
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from jaxgpt.bench import goals
from jaxgpt.bench.__main__ import parser
from jaxgpt.config import parse_args
from jobs import SMALL, command, environment, run
from stand_ins import SLOW, program


@pytest.mark.parametrize("goal", [goal for of in goals.GOALS.values() for goal in of])
def test_every_goal_has_a_command_that_there_is(goal):
    module, *options = goal.words
    if module == "bench":
        more = ["--nanogpt", ".", "--torch", "python"] if goal.beside_nanogpt else []
        _, options = parser().parse_known_args([*options, *more])
    else:
        assert module == "train"
    assert parse_args(options).config == goal.config


def test_goals_are_measured_and_those_that_cannot_be_say_why(tmp_path):
    (tmp_path / "model.py").touch()
    slow, ends = (tmp_path / name for name in ("slow", "ends"))
    program(slow, SLOW)
    program(ends, "#!/bin/sh\necho no torch here >&2\n")
    options = ("--only", "shakespeare_char_cpu", "--nanogpt", tmp_path, *SMALL[2:])
    job = run("bench", "goals", *options, "--torch", slow)
    assert job.returncode == 0, job.stdout
    (row,) = (line for line in job.stdout.splitlines() if line.startswith("| `bench"))
    assert row.startswith("| `bench nanogpt --config shakespeare_char_cpu data.dataset=python")
    # The program that stands in for nanoGPT has no loss: however slow it is, that is no comparison.
    assert "| - (losses differ by " in row and row.endswith(" | - |")
    assert "random tokens" not in row

    job = run("bench", "goals", *options, "--torch", ends, "--json")
    assert job.returncode == 0, job.stdout
    (found,) = json.loads(job.stdout.splitlines()[-1])["goals"]
    assert found["value"] is found["met"] is None
    assert "nanoGPT has ended (no torch here)" in found["error"]


RATIO = {"ratio": 1.3, "devices": 1, "device_kind": "cpu", "data": "mine"}


@pytest.mark.parametrize(
    ("ended", "expected"),
    [
        ((0, RATIO | {"loss_difference": 1e-6}, ""), {"value": 1.3, "loss_difference": 1e-6}),
        ((0, RATIO | {"loss_difference": 2e-4}, ""), {"error": "losses differ by 0.0002"}),
        ((0, RATIO | {"loss_difference": math.nan}, ""), {"error": "losses differ by nan"}),
        ((2, {}, "warning\nerror: a: b\n"), {"error": "a: b"}),
        ((1, {}, "Traceback\nOut of memory\n\n"), {"error": "ended with status 1: Out of memory"}),
        ((-9, {}, ""), {"error": "ended with status -9: no word"}),
    ],
)
def test_a_ratio_counts_where_losses_agree_and_a_failure_keeps_its_words(
    monkeypatch, ended, expected
):
    status, found, said = ended
    process = subprocess.CompletedProcess([], status, json.dumps(found), said)
    monkeypatch.setattr(goals.subprocess, "run", lambda *words, **options: process)
    goal = goals.GOALS["cpu"][0]
    result = goals.result(goal, goal.words, Path())
    assert {key: result[key] for key in expected} == expected
    assert (result["value"] is None) == ("error" in expected)


def test_a_run_without_a_finite_loss_has_no_best_one(monkeypatch, tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"kind": "eval", "step": 2, "val_loss": null}\n')
    process = subprocess.CompletedProcess([], 0, "", "")
    monkeypatch.setattr(goals.subprocess, "run", lambda *words, **options: process)
    goal = goals.GOALS["gpu"][-1]
    assert goals.result(goal, goal.words, tmp_path)["error"] == "no loss was finite"


def test_the_goals_are_those_that_were_set():
    set_as = {
        "cpu": [("shakespeare_char_cpu", "ratio", 1.2), ("shakespeare_char", "ratio", 1.0)],
        "gpu": [
            ("gpt2", "tokens_per_sec", 470_000),
            ("gpt2", "ratio", 1.15),
            ("gpt2-xl", "mfu", 0.55),
            ("shakespeare_char", "ratio", 1.5),
            ("shakespeare_char", "val_loss", 1.48),
        ],
    }
    found = {on: [(g.config, g.quantity, g.bound) for g in of] for on, of in goals.GOALS.items()}
    assert found == set_as


def test_the_best_validation_loss_of_a_run_is_taken(tmp_path):
    evaluated = ("train.max_iters=4", "train.eval_interval=2", "train.batch_size=16")
    goal = goals.Goal(SMALL[1], ("train",), (*SMALL[2:], *evaluated), "", "val_loss", 1, True)
    value = goals.result(goal, goal.words, tmp_path / "run")["value"]
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    losses = [r["val_loss"] for r in map(json.loads, lines) if r["kind"] == "eval"]
    assert len(losses) > 1 and value == min(losses)


def test_the_table_for_a_gpu_has_what_is_met_missed_and_unknown(monkeypatch, tmp_path):
    unknown = {"value": None, "error": "the device's peak is not known"}
    values = iter([{"value": 470_000, "device_kind": "H100"}, {"value": 1.149}, unknown])
    monkeypatch.setattr(goals, "accelerator_expected", lambda: True)
    monkeypatch.setattr(goals, "result", lambda *given: next(values, {"value": 1.48}))
    (tmp_path / "model.py").touch()
    nanogpt = {"nanogpt": tmp_path, "torch": "sh"}
    found = goals.measure(["model.n_layer=1"], None, **nanogpt)
    assert [row["met"] for row in found["goals"]] == [True, False, None, False, True]
    table = goals.describe(found).splitlines()
    assert table[0] == "goals: for one H100 or H200, measured on H100"
    assert "| at least 470,000 tokens/s | 470,000 tokens/s | yes |" in table[3]
    assert "| at least 1.150 x | 1.149 x | no |" in table[4]
    assert "| at least mfu 55.00% | - (the device's peak is not known) | - |" in table[5]
    assert "| at most 1.480 | 1.480 | yes |" in table[7]

    without = goals.measure([], None, None, None)["goals"]
    assert [row["error"] for row in without if row["value"] is None] == [
        "give --nanogpt and --torch"
    ] * 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ["--only", "gpt2"],
            "--only=gpt2: has no goal on a cpu; give one of shakespeare_char_cpu,",
        ),
        (["model.n_head=5"], "model.n_embd=128: must be a multiple of model.n_head=5"),
        (["--config", "tiny"], "--config: the goals have configurations of their own; give --only"),
        (["config=tiny"], "--config: the goals have configurations of their own; give --only"),
        ([], "give a clone of it with --nanogpt and a Python with torch with --torch"),
        (["--torch", "python"], "bench goals: nanoGPT is what these speeds are set against"),
        (["--nanogpt", "/nope", "--torch", "python"], "--nanogpt=/nope: has no model.py; give a"),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(options, words):
    job = run("bench", "goals", *options)
    assert job.returncode == 2
    assert words in job.stdout and job.stdout.count("\n") == 1


def test_processes_are_started_by_the_bench_and_not_by_a_launcher(tmp_path):
    options = ("--nanogpt", tmp_path, "--torch", "python")
    job = run("bench", "goals", *options, processes=1)
    assert job.returncode == 2
    assert "bench goals starts the processes itself; run it without the launcher" in job.stdout


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_goes_on_when_it_is_interrupted(number, tmp_path):
    (tmp_path / "model.py").touch()
    waits = program(tmp_path / "waits", "#!/bin/sh\necho $$ >> pids\nexec sleep 100\n")
    job = subprocess.Popen(
        command("bench", "goals", "--nanogpt", tmp_path, "--torch", waits),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=tmp_path,
        env=environment(TMPDIR=str(tmp_path)),
    )  # fmt: skip
    worker = Path("/proc") / wait_for(lambda: (tmp_path / "pids").read_text().strip())
    bench = int((worker / "stat").read_text().rpartition(")")[2].split()[1])
    job.send_signal(number)
    assert job.wait(30) == (-number if number == signal.SIGKILL else 128 + number)
    if number == signal.SIGKILL:  # nobody could tell it
        os.kill(bench, number)
    wait_for(lambda: not worker.exists() or " Z " in (worker / "stat").read_text())
    wait_for(lambda: not list(tmp_path.glob("jaxgpt*")))


def wait_for(find):
    """What `find` returns, once that is something."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError):
            if found := find():
                return found
        time.sleep(0.1)
    raise AssertionError("not in 30 seconds")
