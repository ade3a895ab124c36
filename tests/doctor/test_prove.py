"""`doctor prove`: a failed check does not end the others, and a finished check is not repeated."""

import json
import signal
import subprocess
import time
from types import SimpleNamespace

import pytest

from jaxgpt.doctor.prove.check import Check
from jaxgpt.doctor.prove.command import CHECKS
from jaxgpt.doctor.prove.results import Result, markdown
from jobs import command, environment, run


def prove(out, *words, **extra):
    return run("doctor", "prove", "--out", out, *words, **extra)


def results(out):
    path = out / "prove.json"
    return {r["check"]: r for r in json.loads(path.read_text())["checks"]} if path.exists() else {}


def test_a_second_call_runs_only_what_is_not_done(tmp_path):
    out, clone = tmp_path / "out", tmp_path / "none"
    job = subprocess.Popen(
        command("doctor", "prove", "facts", "numerics", "--out", out),
        env=environment(), stderr=subprocess.DEVNULL,
    )  # fmt: skip
    while not list(out.glob("numerics/1.*")):
        assert job.poll() is None
        time.sleep(0.1)
    job.send_signal(signal.SIGTERM)
    assert job.wait(60) == 128 + signal.SIGTERM
    assert results(out)["facts"]["status"] == "done"
    assert results(out)["numerics"]["status"] == "running"
    (out / "speed-gpt2").write_text("in the way of the check's folder")

    again = prove(out, "speed-gpt2", "facts", "nanogpt", "--nanogpt", clone)
    assert again.returncode == 1, again.stdout
    assert "facts: at most" not in again.stdout
    assert "| speed-gpt2 | **failed** | FileExistsError" in again.stdout
    assert (
        "| nanogpt | **missing** | a clone of nanoGPT: give it with --nanogpt DIR" in again.stdout
    )
    assert list(results(out)) == list(CHECKS)
    assert (out / "prove.md").read_text() in again.stdout


def test_a_check_ends_its_command_when_its_time_is_over(tmp_path):
    result = Result("sleep")
    check = Check(result, SimpleNamespace(out=tmp_path), 1.0, lambda: None)
    script = tmp_path / "sleep.py"
    script.write_text("import subprocess; subprocess.run(['sleep', '600'])")
    check.execute(lambda check: check.run(str(script)))
    assert (result.status, result.reason) == ("cut off", "not done within its 1 s")
    assert result.seconds < 60


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("memroy",), "memroy: is no check; give some of facts, speed-gpt2"),
        (("--minutes", "0"), "--minutes: 0: must be a whole number, at least 1"),
        (("--out", "/proc/x"), "--out=/proc/x: cannot be written"),
    ],
)
def test_bad_input_is_answered_with_a_sentence(tmp_path, words, said):
    found = prove(tmp_path / "out", *words)
    assert found.returncode == 2
    assert said in found.stdout and "Traceback" not in found.stdout
    assert not (tmp_path / "out").exists()


def test_a_goal_is_met_only_by_a_number_on_its_side(tmp_path):
    result = Result("speed-gpt2", "done")
    check = Check(result, SimpleNamespace(out=tmp_path), 1.0, lambda: None)
    for value in (1.5, 1.49, None):
        check.add("ratio", value, "x", at_least=1.5)
    for value in (0.02, 0.021, float("nan")):
        check.add("error", value, at_most=0.02)
    assert [row.met for row in result.rows] == [True, False, False] * 2
    check.add("tokens/s", 512_345.6, "", "on random | tokens", at_least=470_000, source="llm.c")
    lines = markdown([result, Result("nanogpt", "missing", "torch")]).splitlines()
    goal = "at least 470,000 (llm.c)"
    assert lines[8] == f"| speed-gpt2 | tokens/s | 512,346 (on random / tokens) | {goal} | yes |"
    assert lines[9] == "| nanogpt | **missing** | torch |  |  |"


@pytest.mark.long
def test_all_checks_run_in_small_on_a_cpu(tmp_path):
    found = prove(tmp_path, "--minutes", "15", timeout=1000)
    assert found.returncode == 0, found.stdout
    ends = {name: result["status"] for name, result in results(tmp_path).items()}
    assert ends.pop("nanogpt") == "missing"
    assert set(ends.values()) == {"done"}
    numerics = results(tmp_path)["numerics"]["rows"]
    assert all(row["met"] for row in numerics if row["goal"])
