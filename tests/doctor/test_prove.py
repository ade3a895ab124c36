"""`doctor prove`: stages run apart, fail apart, and are not run again once they are done."""

import json
import signal
import subprocess
import time

import pytest

from jaxgpt.doctor.prove.command import STAGES
from jaxgpt.doctor.prove.goals import Goal
from jaxgpt.doctor.prove.results import StageResult, markdown, read_result
from jobs import command, environment, run


def prove(out, *words, **extra):
    return run("doctor", "prove", "--out", out, *words, **extra)


def result(out, stage):
    return json.loads((out / stage / "result.json").read_text())


def test_a_call_goes_on_after_a_kill_and_runs_all_but_what_fails_or_lacks_something(tmp_path):
    words = ("facts", "nanogpt", "--nanogpt", tmp_path / "none", "--out", tmp_path)
    process = subprocess.Popen(
        command("doctor", "prove", "numerics", *words),
        env=environment(), stderr=subprocess.DEVNULL,
    )  # fmt: skip
    while (found := read_result(tmp_path / "numerics", "numerics")) is None:
        assert process.poll() is None
        time.sleep(0.1)
    assert found.status == "running"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert result(tmp_path, "facts")["status"] == "done"
    assert result(tmp_path, "nanogpt")["status"] == "needs"
    (tmp_path / "speed-gpt2").write_text("in the way of the stage's folder")

    again = run("doctor", "prove", "speed-gpt2", *words)
    assert again.returncode == 1, again.stdout
    assert "facts: at most" not in again.stdout  # it was done
    assert "nanogpt: at most" in again.stdout  # what was lacking may be there now
    assert "| speed-gpt2 | **failed** |" in again.stdout
    table = json.loads((tmp_path / "prove.json").read_text())
    assert [stage["stage"] for stage in table["stages"]] == list(STAGES)
    assert (tmp_path / "prove.md").read_text() in again.stdout


def test_two_at_a_time_in_one_folder_are_refused(tmp_path):
    first = subprocess.Popen(
        command("doctor", "prove", "facts", "--out", tmp_path), env=environment()
    )
    while not (tmp_path / "facts").exists():
        assert first.poll() is None
        time.sleep(0.05)
    second = prove(tmp_path, "facts")
    assert second.returncode == 2 and "another prove is at work there" in second.stdout
    assert first.wait() == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("memroy",), "memroy: is no stage; give some of facts, speed-gpt2"),
        (("--minutes", "0"), "0 must be minutes, from 0.5 to 1440"),
        (("--minutes", "soon"), "soon must be minutes"),
    ],
)
def test_what_cannot_be_run_is_refused_in_a_sentence(tmp_path, words, said):
    found = prove(tmp_path / "out", *words)
    assert found.returncode == 2
    assert said in found.stdout and "Traceback" not in found.stdout
    assert not (tmp_path / "out").exists()


def test_a_goal_is_met_by_a_number_on_its_side_only():
    least, most = Goal(1.5), Goal(0.02, at_most=True)
    assert least.is_met(1.5) and not least.is_met(1.49)
    assert most.is_met(0.02) and not most.is_met(0.021)
    assert not least.is_met(None) and not most.is_met(float("nan"))


def test_the_table_has_a_line_for_each_row_and_each_stage_without_an_end():
    done = StageResult("speed-gpt2", "done")
    done.add(True, "tokens/s", 512_345.6, "", "on random | tokens")
    lacking = StageResult("nanogpt", "needs", "torch")
    lines = markdown([done, lacking], "jaxgpt").splitlines()
    goal = "at least 470,000 (llm.c: 468,000)"
    assert lines[4] == f"| speed-gpt2 | tokens/s | 512,346 (on random / tokens) | {goal} | yes |"
    assert lines[5] == "| nanogpt | **needs** | torch |  |  |"


@pytest.mark.long
def test_all_stages_run_in_small_on_a_cpu(tmp_path):
    found = prove(tmp_path, "--minutes", "15", timeout=1000)
    assert found.returncode == 0, found.stdout
    stages = json.loads((tmp_path / "prove.json").read_text())["stages"]
    ends = {stage["stage"]: stage["status"] for stage in stages}
    assert ends.pop("nanogpt") in ("done", "needs")
    assert set(ends.values()) == {"done"}
    numerics = result(tmp_path, "numerics")["rows"]
    assert all(row["met"] for row in numerics if row["goal"])
