"""`doctor prove`: a failed check does not end the others, and a finished check is not repeated."""

import json
import math
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxgpt.config import UsageError
from jaxgpt.doctor.prove import attention, checks
from jaxgpt.doctor.prove.checks import CHECKS, memory, profile
from jaxgpt.doctor.prove.command import markdown, read_results, run_check
from jaxgpt.doctor.prove.measure import CommandFailed, Commands, row
from jobs import command, environment, run


def prove(out, *words, **extra):
    return run("doctor", "prove", "--out", out, *words, **extra)


def results(out):
    return json.loads((out / "prove.json").read_text())["checks"]


def test_a_second_call_runs_only_unfinished_checks(tmp_path):
    out, clone = tmp_path / "out", tmp_path / "none"
    job = subprocess.Popen(
        command("doctor", "prove", "facts", "numerics", "--out", out),
        env=environment(), stderr=subprocess.DEVNULL,
    )  # fmt: skip
    while not (out / "numerics").exists():
        assert job.poll() is None
        time.sleep(0.1)
    job.send_signal(signal.SIGTERM)
    assert job.wait(60) == 128 + signal.SIGTERM
    assert {name: found["status"] for name, found in results(out).items()} == {"facts": "done"}
    assert "training" in {row["name"] for row in results(out)["facts"]["rows"]}
    (out / "gpt2").write_text("in the way of the check's folder")

    again = prove(out, "gpt2", "nanogpt", "--nanogpt", clone)
    assert again.returncode == 1, again.stdout
    assert "| facts | training | loss " in again.stdout
    assert "| gpt2 | **failed** | FileExistsError" in again.stdout
    assert (
        "| nanogpt | **missing** | a clone of nanoGPT; pass its path as --nanogpt DIR"
        in again.stdout
    )
    assert (out / "prove.md").read_text().endswith(markdown(results(out)))


QUICK_CHECKS = """
import sys, time
from jaxgpt.doctor.prove import command
from jaxgpt.doctor.prove.measure import Missing, row

def quick(commands):
    yield row("value", 1.0)

def slow(commands):
    yield row("first", 1.0)
    commands.run(sys.argv[1])
    yield row("second", 2.0)

command.MIN_SECONDS = 1
command.CHECKS = {"one": (quick, 9), "two": (slow, 1.5), "ab: x": (quick, 9), "ab: y": (quick, 9)}
command.main(sys.argv[2:])
"""


def test_checks_run_in_order_within_their_limits_and_a_second_call_continues(tmp_path):
    driver, work, out = tmp_path / "driver.py", tmp_path / "work.py", tmp_path / "out"
    driver.write_text(QUICK_CHECKS)

    def call(*words):
        job = subprocess.run(
            [sys.executable, driver, work, *words, "--out", out, "--minutes", "1"],
            env=environment(), capture_output=True, text=True,
        )  # fmt: skip
        started = [line.partition(": at most")[0] for line in job.stderr.splitlines()]
        return job.returncode, started

    work.write_text("import time; time.sleep(600)")
    assert call() == (75, ["one", "two", "ab: x", "ab: y"])
    two = results(out)["two"]
    assert two["status"] == "cut off" and [row["name"] for row in two["rows"]] == ["first"]

    work.write_text("")
    assert call() == (0, ["two"])
    assert [row["name"] for row in results(out)["two"]["rows"]] == ["first", "second"]
    assert list(results(out)) == ["one", "two", "ab: x", "ab: y"]
    assert call() == (0, [])
    assert call("ab") == (0, ["ab: x", "ab: y"])  # checks that are named run again
    assert (out / "ab-x").is_dir() and (out / "ab-y").is_dir()


@pytest.mark.parametrize("text", ["{", "{}", '{"checks": {"gpt2": {"rows": []}}}', "[" * 100_000])
def test_results_of_another_format_are_an_error(tmp_path, text):
    (tmp_path / "prove.json").write_text(text)
    with pytest.raises(UsageError, match="does not contain results of prove"):
        read_results(tmp_path)


class Doctor(Commands):
    """Answers as the doctor does if all is well."""

    def run(self, module, *words, **options):
        return "OK   hosts: 1 host\n"


@pytest.mark.parametrize(
    ("script", "value", "met"),
    [
        ("echo 580, 1980 MHz", "580, 1980 MHz\n", None),
        ("echo no devices; exit 6", "nvidia-smi ended with status 6: no devices\n", False),
        ("exec sleep 60", "nvidia-smi did not end within 1 s", False),
    ],
)
def test_a_broken_nvidia_smi_does_not_hide_the_findings_of_the_doctor(
    tmp_path, monkeypatch, script, value, met
):
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(checks, "COMMAND", 1.0)
    found = run_check(checks.facts, Doctor(tmp_path / "facts", 60.0))
    assert found["status"] == "done"
    assert [row["name"] for row in found["rows"]] == ["hosts", checks.NVIDIA]
    assert (found["rows"][1]["value"], found["rows"][1]["met"]) == (value, met)


class OneGPU(Commands):
    """Answers `bench step` as on a GPU that is not in the hardware table."""

    def json(self, module, *words, **variables):
        assert words[words.index("--mesh") + 1] == "1,1,1"
        assert variables["CUDA_VISIBLE_DEVICES"] == "5"
        return {"device_kind": "NVIDIA Z9"}


def test_memory_uses_one_gpu_and_needs_it_in_the_hardware_table(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,3")
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    found = run_check(memory, OneGPU(tmp_path / "memory", 60.0, None, "python"))
    assert found["status"] == "missing"
    assert found["reason"] == "a row for NVIDIA Z9 in jaxgpt/perf/hardware.py"


class NoPeak(Commands):
    """Answers `bench step` as on a device that does not report its peak memory."""

    def json(self, module, *words, **variables):
        return {"device_kind": "NVIDIA H200", "peak_bytes": None}


def test_memory_without_a_measured_peak_is_missing(tmp_path):
    found = run_check(memory, NoPeak(tmp_path / "memory", 60.0))
    assert found["status"] == "missing" and "peak memory" in found["reason"]


def test_a_nan_in_one_gradient_is_not_hidden_by_the_others(monkeypatch):
    xla = attention.KERNELS["xla"]
    with_nan = jax.custom_vjp(lambda v: v)
    with_nan.defvjp(lambda v: (v, None), lambda _, d: (d * jnp.nan,))

    def make(setting):
        attend = xla.make(setting)
        return lambda q, k, v, *rest: attend(q, k, with_nan(v), *rest)

    monkeypatch.setitem(attention.KERNELS, "broken", xla._replace(make=make))
    monkeypatch.setattr(attention, "choose_attention", lambda setting: ("broken", "a test"))
    forward, gradient, _ = attention.attention_errors(())
    assert forward < 0.1 and math.isnan(gradient)


@pytest.mark.parametrize("loss", [2.5, None])
def test_a_non_finite_loss_misses_the_goal(tmp_path, monkeypatch, loss):
    histories = iter([[(2.5, 1.0), (2.0, 1.0)], [(loss, 1.0), (2.0, None)]])
    monkeypatch.setattr(checks, "train", lambda *words: tmp_path)
    monkeypatch.setattr(checks, "_history", lambda out: next(histories))
    [found] = checks.numerics(Commands(tmp_path, 60.0))
    assert found.met == (loss is not None)


class EmptyTrace(Commands):
    """Answers `bench step --profile` as with a driver that lets only administrators profile."""

    def json(self, module, *words, **variables):
        return {"device_kind": "NVIDIA H200", "profile": {"device_seconds": 0}}


def test_a_profile_without_operations_is_missing(tmp_path):
    found = run_check(profile, EmptyTrace(tmp_path / "profile", 60.0))
    assert found["status"] == "missing" and "permission to profile" in found["reason"]


def test_a_check_kills_its_command_at_the_time_limit(tmp_path):
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


def test_a_command_killed_by_another_process_has_failed(tmp_path):
    script = tmp_path / "die.py"
    script.write_text("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    commands = Commands(tmp_path, 60.0, None, "python")
    with pytest.raises(CommandFailed, match="ended too early, with status -9"):
        commands.kill_when(lambda: False, str(script))


def test_the_error_of_a_failed_command_is_reported(tmp_path):
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
        (("memroy",), "memroy: is not a check; choose from facts, gpt2, nanogpt, gpt2-xl,"),
        (("--minutes", "0"), "--minutes: 0: must be a whole number, at least 1"),
        (("--out", "/proc/x"), "--out=/proc/x: cannot be written"),
    ],
)
def test_bad_input_is_a_one_line_error(tmp_path, words, said):
    found = prove(tmp_path / "out", *words)
    assert found.returncode == 2
    assert said in found.stdout and "Traceback" not in found.stdout
    assert not (tmp_path / "out").exists()


def test_prove_refuses_to_run_under_a_launcher(tmp_path):
    """Each process would run every check, and all would write to the same folder."""
    found = prove(tmp_path / "out", "facts", PMI_RANK="0", PMI_SIZE="2")
    assert found.returncode == 2
    assert found.stdout == (
        "error: PMI_RANK=0: is set by a launcher; run prove without one; it uses a single process\n"
    )
    assert not (tmp_path / "out").exists()


def test_only_a_number_within_the_bound_meets_a_goal():
    rows = [row("ratio", value, "x", at_least=1.5) for value in (1.5, 1.49, None)]
    rows += [row("error", value, at_most=0.02) for value in (0.02, 0.021, math.nan)]
    assert [row.met for row in rows] == [True, False, False] * 2
    speed = row("tokens/s", 512_345.6, "", "on random | tokens", at_least=470_000, source="llm.c")
    speeds = {"status": "done", "rows": [row._asdict() for row in (*rows, speed)]}
    missing = {"status": "missing", "reason": "torch", "rows": []}
    lines = markdown({"gpt2": speeds, "nanogpt": missing}).splitlines()
    goal = "at least 470,000 (llm.c)"
    assert lines[8] == f"| gpt2 | tokens/s | 512,346 (on random / tokens) | {goal} | yes |"
    assert lines[9] == "| nanogpt | **missing** | torch |  |  |"


@pytest.mark.long
def test_all_checks_run_with_small_models_on_a_cpu(tmp_path, tiny_shakespeare, monkeypatch):
    monkeypatch.setenv("JAXGPT_DATA", str(tmp_path / "data"))
    out, began = tmp_path / "out", time.monotonic()
    words = ("--minutes", "7", "--text", tiny_shakespeare)
    first = prove(out, *words, timeout=500)
    assert first.returncode in (0, 75), first.stdout
    assert time.monotonic() - began < 7 * 60 + 30
    done = {name for name, found in results(out).items() if found["status"] == "done"}

    # The second call runs only the other checks.
    again = prove(out, "--minutes", "15", "--text", tiny_shakespeare, timeout=1000)
    assert again.returncode == 0, again.stdout
    started = {line.partition(": at most")[0] for line in again.stdout.splitlines()}
    assert not started & done
    ends = {name: found["status"] for name, found in results(out).items()}
    assert list(ends) == list(CHECKS)
    assert ends.pop("nanogpt") == "missing"
    assert set(ends.values()) == {"done"}
    rows = [row for name in ("numerics", "resume") for row in results(out)[name]["rows"]]
    assert all(row["met"] for row in rows)
    assert {row["name"] for row in results(out)["memory"]["rows"]} >= {
        f"error of the plan for {name}" for name in ("gpt2", "gpt2-xl", "tiny")
    }

    changed = prove(out, "--ab", "parallel.remat=full", "xla_cpu_enable_fast_math=false")
    assert changed.returncode == 0, changed.stdout
    last = results(out)["ab: parallel.remat=full; xla_cpu_enable_fast_math=false"]
    assert len(last["rows"]) == 2 and list(results(out))[:-1] == list(CHECKS)
