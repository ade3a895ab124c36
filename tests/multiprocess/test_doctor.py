"""`python -m jaxgpt.doctor`, started as users start it."""

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from jobs import command, environment, process_of, run

HERE = Path(__file__).parent
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
MACHINE = (
    "versions", "launcher", "hosts", "devices", "accelerators", "memory", "cores",
    "shared memory", "interface", "clocks", "run directory", "file system",
)  # fmt: skip


@pytest.mark.parametrize(
    "program", [HERE / "quick_doctor.py", pytest.param("doctor", marks=pytest.mark.long)]
)
def test_four_processes(tmp_path, program):
    out = tmp_path / "runs"
    job = run(program, "--json", "--out", out, processes=4)
    assert job.returncode == 0, job.stdout
    report = json.loads(job.stdout)
    assert report["job"]["processes"] == report["job"]["devices"] == 4
    checks = {c["name"]: c for c in report["checks"]}
    expected = {*MACHINE, *(f"{name} over data" for name in COLLECTIVES), "training"}
    assert set(checks) == expected
    assert "FAIL" not in {c["status"] for c in report["checks"]}
    for name in ("versions", "launcher", "hosts", "devices", "run directory",
                 "training", *(f"{name} over data" for name in COLLECTIVES)):  # fmt: skip
        assert checks[name]["status"] == "OK", checks[name]
    assert "MPICH" in checks["versions"]["finding"]
    assert "4 processes" in checks["hosts"]["finding"]
    for name in COLLECTIVES:
        times = [m for m in report["collectives"] if m["collective"] == name]
        assert [m["bytes"] for m in times][0] == 1024
        assert all(m["seconds"] > 0 and m["bus_bandwidth"] > 0 for m in times)
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--mesh", "2,1"], "parallel.mesh=2,1: must be sizes data,fsdp,tensor"),
        (["--mesh", "2,1,1"], "2 devices cannot be divided evenly among 3 processes"),
        (["--out", "/proc/nowhere"], "out=/proc/nowhere: cannot be written"),
        (["--init-timeout", "0"], "--init-timeout: 0: must be a whole number, at least 1"),
        (["--jsn"], "--jsn; did you mean --json?"),
    ],
)
def test_bad_input_is_one_line(arguments, words):
    job = run("doctor", *arguments, processes=3)
    assert job.returncode == 2, job.stdout
    (line,) = job.stdout.strip().splitlines()
    assert line.startswith("error: ") and words in line


def test_a_mesh_that_does_not_fit_the_devices():
    # The number of devices is known only after JAX has started.
    job = run("doctor", "--mesh", "-1,2,1", processes=3, JAX_NUM_CPU_DEVICES="1")
    assert job.returncode == 2, job.stdout
    assert "error: parallel.mesh=-1,2,1: 2 does not divide the job's 3 devices" in job.stdout


@pytest.mark.long
@pytest.mark.parametrize(
    ("rank", "waiting"),
    [(2, "processes 0 and 1 are"), (0, "process 1 is")],  # only process 0 knows about all processes
)
def test_a_process_that_hangs_is_reported_and_the_job_ends(tmp_path, rank, waiting):
    job = subprocess.Popen(
        command("doctor", "--out", tmp_path, "--init-timeout", "15", processes=3),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(),
    )  # fmt: skip
    output = ""
    for line in job.stdout:
        output += line
        if line.startswith("OK   file system"):  # the collectives come next
            os.kill(process_of(tmp_path, rank), signal.SIGSTOP)
    assert job.wait(60) == 70, output
    assert "OK   versions" in output
    if rank > 0:
        assert "no response within 15 s (--init-timeout)" in output
        assert re.search(r"^\d+ OK, \d+ WARN, 1 FAIL$", output, re.MULTILINE), output
    ours = output.partition("\n=====")[0].rstrip()  # MPICH may report the killed process
    last = (
        rf"error: --init-timeout=15: process {rank} on host \S+ at .+ has not been heard from for "
        rf"0.25 minutes; {waiting} waiting for it at all-reduce .*; the process or its host has .*"
    )
    assert re.fullmatch(last, ours.splitlines()[-1]), output


def test_help_is_printed_once_and_at_once():
    job = run("doctor", "--help", processes=3)
    assert job.returncode == 0
    assert job.stdout.count("--init-timeout S") == 2  # in the usage, and explained
