"""Signals and time limits stop a run after a step; schedulers tell when a job ends."""

import signal
import subprocess
import sys
import time

import pytest

from jaxgpt.cluster import stopping
from jaxgpt.cluster.stopping import margin, pbs_seconds, time_limit

HOUR = 3600.0


@pytest.mark.parametrize(
    ("seconds", "save", "step", "expected"),
    [
        (24 * HOUR, 0, 0, 120),  # nothing is known yet
        (24 * HOUR, 10, 1, 120),
        (24 * HOUR, 100, 1, 300),  # three times as long as the longest
        (24 * HOUR, 50, 400, 1650),  # three steps in progress and the one to agree on
        (300, 0, 0, 75),  # a job of five minutes trains for most of them,
        (300, 60, 1, 90),  # but not for so long that it cannot save
        (24, 0, 0, 6),
    ],
)
def test_a_job_stops_in_time_to_save_and_not_at_once(seconds, save, step, expected):
    assert margin(seconds, save, step) == expected


STEPS = """
import sys, time
from jaxgpt.cluster.monitor import Monitor
from jaxgpt.cluster.stopping import StopSignal, TimeLimit

stop, step = StopSignal(Monitor(), TimeLimit(*eval(sys.argv[1]))), 1
print("ready", flush=True)
while not stop.reached(step):
    step += 1
    if step == 10:
        stop.allow_for_save(float(sys.argv[2]))
    time.sleep(0.01)
print(stop.reason)
"""


def run_steps(limit, save=0.0, numbers=(), prefix=()):
    """Return stdout and stderr of a process that a signal or a time limit stops."""
    words = [*prefix, sys.executable, "-c", STEPS, repr(limit), str(save)]
    job = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert job.stdout.readline() == "ready\n"
    for number in numbers:
        job.send_signal(number)
    said = job.communicate(timeout=60)
    assert job.returncode == 0, said
    return said


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP"])
def test_a_signal_stops_after_a_step(name):
    reason, said = run_steps((), numbers=[signal.Signals[name]])
    assert reason == f"{name}\n"
    assert said.startswith(f"{name}: stopping after the ") and ", with a checkpoint" in said


def test_under_nohup_a_closed_terminal_does_not_stop_the_run():
    numbers = signal.SIGHUP, signal.SIGTERM
    assert run_steps((), numbers=numbers, prefix=["nohup"])[0] == "SIGTERM\n"


def test_a_limit_stops_after_a_step():
    assert run_steps((0.2, "mine"))[0] == "time limit\n"
    assert run_steps((0.4, "the scheduler", True))[0] == "time limit\n"


def test_a_long_checkpoint_stops_a_job_earlier():
    """A checkpoint that takes 3000 s stops a one-hour job at once."""
    reason, said = run_steps((HOUR, "the scheduler", True), save=3000.0)
    assert reason == "time limit\n" and " 4500 s earlier, because a checkpoint takes 3000 s" in said
    assert run_steps((HOUR, "mine", False), save=3000.0, numbers=[signal.SIGTERM])[0] == "SIGTERM\n"


# Like the compiler, this runs outside the interpreter, and Python's own handlers wait for it.
COMPILES = """
import hashlib
from jaxgpt.cluster import stopping
from jaxgpt.cluster.monitor import Monitor
stopping.DEBOUNCE = 0.0
stop = stopping.StopSignal(Monitor(), stopping.TimeLimit())
print("ready", flush=True)
hashlib.pbkdf2_hmac("sha256", b"word", b"salt", 10**9)
"""


@pytest.mark.parametrize(
    ("first", "leave"), [("SIGINT", "Ctrl-C again"), ("SIGTERM", "Ctrl-C twice or SIGKILL")]
)
def test_a_signal_is_answered_while_a_step_compiles_and_ctrl_c_leaves(first, leave):
    job = subprocess.Popen(
        [sys.executable, "-c", COMPILES], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert job.stdout.readline() == "ready\n"
    job.send_signal(signal.Signals[first])
    assert job.stderr.readline() == (
        f"{first}: stopping after the first step, with a checkpoint; {leave} exits at once, "
        "without one\n"
    )
    if first == "SIGTERM":
        job.send_signal(signal.SIGTERM)  # no effect
        job.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            job.wait(0.5)
    job.send_signal(signal.SIGINT)
    assert job.wait(60) == 128 + signal.SIGINT
    assert job.stderr.read() == "second Ctrl-C: exits without a checkpoint\n"


# The lines of `qstat -f` that matter and those that look alike. PBS Professional and OpenPBS as
# their reference guides list a job's attributes; Torque as its administrator's guide does.
PBS = """Job Id: 1234.pbs01
    Job_Name = gpt2
    resources_used.walltime = 00:10:09
    job_state = R
    ctime = Thu Nov 26 08:00:00 2026
    Resource_List.ncpus = 64
    Resource_List.soft_walltime = 00:30:00
    Resource_List.walltime = 01:00:00
    stime = Thu Nov 26 10:00:00 2026
    eligible_time = 02:00:00
    Submit_arguments = -l walltime=99:00:00 job.pbs
"""
LONG = PBS.replace("01:00:00", "168:00:00")
TORQUE = """Job Id: 142.node7
    resources_used.walltime = 00:00:14
    job_state = R
    ctime = Thu Nov 26 08:00:00 2026
    etime = Thu Nov 26 08:00:00 2026
    Resource_List.nodes = 1:ppn=4
    Resource_List.walltime = 01:00:00
    start_time = Thu Nov 26 10:00:00 2026
    Walltime.Remaining = 3586
    start_count = 1
"""
STARTED = time.mktime((2026, 11, 26, 10, 0, 0, 0, 0, -1))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (PBS, 3_600),
        (TORQUE, 3_600),
        (LONG, 168 * 3_600),
        (PBS.replace("stime =", "qtime ="), None),  # queued
        (PBS.replace("Resource_List.walltime", "Resource_List.cput"), None),
        (PBS.replace("10:00:00 2026", "ten"), None),
        ("", None),
    ],
)
def test_qstats_forms(text, seconds):
    found = pbs_seconds(text, STARTED + 600)
    assert found == (seconds and seconds - 600)


@pytest.fixture
def scheduler(tmp_path, monkeypatch):
    """Creates a scheduler command that runs a line of shell."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def make(name, body):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)

    return make


SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "4102444800"}
PBS_JOB = {"PBS_JOBID": "1234.pbs01"}


def test_slurm_says_when_a_job_ends():
    limit = time_limit("auto", 5.0, SLURM)  # 2100-01-01
    assert limit.seconds == pytest.approx(4_102_444_800 - time.time(), abs=60)
    assert limit.line == "SLURM_JOB_END_TIME" and limit.ends_job


def test_pbs_is_asked_for_this_job(scheduler):
    started = time.ctime(time.time() - 600)
    text = PBS.replace("Thu Nov 26 10:00:00 2026", started)
    scheduler("qstat", f"[ \"$*\" = '-f 1234.pbs01' ] && cat <<'END'\n{text}\nEND")
    limit = time_limit("auto", 5.0, PBS_JOB)
    assert limit.seconds == pytest.approx(3_000, abs=60)
    assert limit.line == "qstat -f 1234.pbs01" and limit.ends_job


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("echo Job_Name = gpt2", "does not report it (no walltime); "),
        ("echo Socket timed out >&2; exit 1", "does not report it (Socket timed out); "),
        ("exit 35", "does not report it (status 35); "),
        ("exec sleep 20", "does not report it (no answer within 1 s); "),
        (None, "does not report it (qstat: No such file or directory); "),
    ],
)
def test_a_limit_that_is_not_known_is_said_to_be(scheduler, body, words, monkeypatch):
    monkeypatch.setattr(stopping, "COMMAND", 1.0)
    if body is not None:
        scheduler("qstat", body)
    else:
        monkeypatch.setenv("PATH", "/nowhere")
    assert_not_known(time_limit("auto", 0.0, PBS_JOB), f"qstat -f 1234.pbs01 {words}")
    assert_not_known(
        time_limit("auto", 0.0, {"SLURM_JOB_ID": "7"}), "SLURM_JOB_END_TIME is not set"
    )


def assert_not_known(limit, words):
    assert (limit.seconds, limit.ends_job) == (None, False)
    assert limit.line.startswith(f"unknown, because {words}")
    assert limit.line.endswith("; set train.time_limit=MINUTES to save before the job ends")


def test_a_users_own_limit_comes_before_the_schedulers():
    assert time_limit(1.5, 30.0, SLURM) == (60, "train.time_limit=1.5", False)
    assert time_limit(None, 30.0, SLURM).seconds is None
    assert time_limit("auto", 30.0, {}).seconds is None
