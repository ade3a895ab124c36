"""A signal or a time limit becomes a step to stop at; the margin before a job's end."""

import signal
import subprocess
import sys

import pytest

from jaxgpt.cluster.health.preemption import margin

HOUR = 3600.0


@pytest.mark.parametrize(
    ("seconds", "save", "step", "expected"),
    [
        (24 * HOUR, 0, 0, 120),  # nothing is known yet
        (24 * HOUR, 10, 1, 120),
        (24 * HOUR, 100, 1, 300),  # three times as long as the longest
        (24 * HOUR, 50, 400, 850),  # the step under way and the one to agree on
        (300, 0, 0, 75),  # a job of five minutes trains for most of them,
        (300, 60, 1, 90),  # but not for so long that it cannot save
        (24, 0, 0, 6),
    ],
)
def test_a_job_stops_in_time_to_save_and_not_at_once(seconds, save, step, expected):
    assert margin(seconds, save, step) == expected


STEPS = """
import sys, time
from jaxgpt.cluster.health.preemption import StopSignal
from jaxgpt.cluster.health.walltime import TimeLimit

stop, step = StopSignal(TimeLimit(*eval(sys.argv[1]))), 1
print("ready", flush=True)
while not stop.reached(step):
    step += 1
    if step == 10:
        stop.allow_for_save(float(sys.argv[2]))
    time.sleep(0.01)
print(stop.reason)
"""


def run_steps(limit, save=0.0, number=None):
    """What a process says on stdout and stderr that a signal or a limit stops."""
    words = [sys.executable, "-c", STEPS, repr(limit), str(save)]
    job = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert job.stdout.readline() == "ready\n"
    if number is not None:
        job.send_signal(number)
    said = job.communicate(timeout=60)
    assert job.returncode == 0, said
    return said


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2"])
def test_a_signal_stops_after_a_step(name):
    reason, said = run_steps((), number=signal.Signals[name])
    assert reason == f"{name}\n"
    assert said.startswith(f"{name}: stops after the ") and ", with a checkpoint" in said


def test_a_limit_stops_after_a_step():
    assert run_steps((0.2, "mine"))[0] == "time limit\n"
    assert run_steps((0.4, "the scheduler", True))[0] == "time limit\n"


def test_a_long_checkpoint_stops_a_job_earlier():
    """One that took 3000 s, in a job of one hour: at once."""
    reason, said = run_steps((HOUR, "squeue", True), save=3000.0)
    assert reason == "time limit\n" and ", 4500 s before, as a checkpoint takes 3000 s\n" in said
    assert run_steps((HOUR, "mine", False), save=3000.0, number=signal.SIGTERM)[0] == "SIGTERM\n"


# Outside of Python's interpreter, as the compiler is: Python's own handlers wait for it to return.
COMPILES = """
import hashlib
from jaxgpt.cluster.health import preemption, walltime
preemption.DEBOUNCE = 0.0
stop = preemption.StopSignal(walltime.TimeLimit())
print("ready", flush=True)
hashlib.pbkdf2_hmac("sha256", b"word", b"salt", 10**9)
"""


def test_ctrl_c_is_answered_while_a_step_compiles_and_the_second_one_leaves():
    job = subprocess.Popen(
        [sys.executable, "-c", COMPILES], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert job.stdout.readline() == "ready\n"
    job.send_signal(signal.SIGINT)
    assert job.stderr.readline() == (
        "SIGINT: stops after the first step, with a checkpoint; Ctrl-C again leaves at once, "
        "without one\n"
    )
    job.send_signal(signal.SIGINT)
    assert job.wait(60) == 128 + signal.SIGINT
