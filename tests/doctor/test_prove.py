"""`doctor prove`: a failed check does not end the others, and a finished check is not repeated."""

import json
import math
import signal
import subprocess
import time
from pathlib import Path

import pytest

from jaxgpt.doctor.prove.checks import CHECKS
from jaxgpt.doctor.prove.command import markdown, run_check
from jaxgpt.doctor.prove.measure import CommandFailed, Commands, row
from jobs import command, environment, run


def prove(out, *words, **extra):
    return run("doctor", "prove", "--out", out, *words, **extra)


def results(out):
    return json.loads((out / "prove.json").read_text())["checks"]


def test_a_second_call_runs_only_what_is_not_done(tmp_path):
    out, clone = tmp_path / "out", tmp_path / "none"
    job = subprocess.Popen(
        command("doctor", "prove", "machine", "numerics", "--out", out),
        env=environment(), stderr=subprocess.DEVNULL,
    )  # fmt: skip
    while not (out / "numerics").exists():
        assert job.poll() is None
        time.sleep(0.1)
    job.send_signal(signal.SIGTERM)
    assert job.wait(60) == 128 + signal.SIGTERM
    assert {name: found["status"] for name, found in results(out).items()} == {"machine": "done"}
    assert "training" in {row["name"] for row in results(out)["machine"]["rows"]}
    (out / "speed-gpt2").write_text("in the way of the check's folder")

    again = prove(out, "speed-gpt2", "machine", "nanogpt", "--nanogpt", clone)
    assert again.returncode == 1, again.stdout
    assert "machine: at most" not in again.stdout
    assert "| speed-gpt2 | **failed** | FileExistsError" in again.stdout
    assert (
        "| nanogpt | **missing** | a clone of nanoGPT; pass its path as --nanogpt DIR"
        in again.stdout
    )
    assert (out / "prove.md").read_text().endswith(markdown(results(out)))


def test_a_check_ends_its_command_when_its_time_is_over(tmp_path):
    script = tmp_path / "sleep.py"
    # The script starts a child process, as the comparison with nanoGPT does.
    child = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))"
    child += "; time.sleep(600)"
    script.write_text(f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])")
    began = time.monotonic()
    for use in (
        lambda commands: commands.run(str(script)),
        lambda commands: commands.kill_when(lambda: False, str(script)),
    ):
        found = run_check(use, Commands(tmp_path / "check", 1.0, None, "python"))
        assert (found["status"], found["reason"]) == ("cut off", "it reached its time limit")
    assert time.monotonic() - began < 60
    child_status = Path("/proc", (tmp_path / "pid").read_text(), "status")
    deadline = time.monotonic() + 30  # a process ends some time after the signal
    while child_status.exists() and "zombie" not in child_status.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_command_that_something_else_kills_has_failed(tmp_path):
    script = tmp_path / "die.py"
    script.write_text("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    commands = Commands(tmp_path, 60.0, None, "python")
    with pytest.raises(CommandFailed, match="ended too early, with status -9"):
        commands.kill_when(lambda: False, str(script))


def test_a_failed_command_is_quoted(tmp_path):
    def fails(commands):
        yield row("before", 1.0)
        commands.run("jaxgpt.train", "model.n_head=3")

    found = run_check(fails, Commands(tmp_path / "check", 60.0, None, "python"))
    assert found["status"] == "failed" and [row["name"] for row in found["rows"]] == ["before"]
    error = "jaxgpt.train ended with status 2: error: model.n_embd=128: must be a multiple"
    assert found["reason"].startswith(f"CommandFailed: {error}")
    assert error.partition("error: ")[2] in (tmp_path / "check" / "log").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("memroy",), "memroy: is not a check; choose from machine, speed-gpt2"),
        (("--minutes", "0"), "--minutes: 0: must be a whole number, at least 1"),
        (("--out", "/proc/x"), "--out=/proc/x: cannot be written"),
    ],
)
def test_bad_input_is_answered_with_a_sentence(tmp_path, words, said):
    found = prove(tmp_path / "out", *words)
    assert found.returncode == 2
    assert said in found.stdout and "Traceback" not in found.stdout
    assert not (tmp_path / "out").exists()


def test_a_goal_is_met_only_by_a_number_on_its_side():
    rows = [row("ratio", value, "x", at_least=1.5) for value in (1.5, 1.49, None)]
    rows += [row("error", value, at_most=0.02) for value in (0.02, 0.021, math.nan)]
    assert [row.met for row in rows] == [True, False, False] * 2
    speed = row("tokens/s", 512_345.6, "", "on random | tokens", at_least=470_000, source="llm.c")
    speeds = {"status": "done", "rows": [row._asdict() for row in (*rows, speed)]}
    missing = {"status": "missing", "reason": "torch", "rows": []}
    lines = markdown({"speed-gpt2": speeds, "nanogpt": missing}).splitlines()
    goal = "at least 470,000 (llm.c)"
    assert lines[8] == f"| speed-gpt2 | tokens/s | 512,346 (on random / tokens) | {goal} | yes |"
    assert lines[9] == "| nanogpt | **missing** | torch |  |  |"


@pytest.mark.long
def test_all_checks_run_in_small_on_a_cpu(tmp_path):
    found = prove(tmp_path, "--minutes", "15", timeout=1000)
    assert found.returncode == 0, found.stdout
    ends = {name: result["status"] for name, result in results(tmp_path).items()}
    assert list(ends) == list(CHECKS)
    assert ends.pop("nanogpt") == "missing"
    assert ends.pop("shakespeare") in ("done", "missing")  # its data may be missing
    assert set(ends.values()) == {"done"}
    rows = [row for name in ("numerics", "resume") for row in results(tmp_path)[name]["rows"]]
    assert all(row["met"] for row in rows)
