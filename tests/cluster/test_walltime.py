"""When a scheduler ends a job, from what its commands print."""

import time

import pytest

from jaxgpt.cluster.health import walltime
from jaxgpt.cluster.health.walltime import pbs_seconds, slurm_seconds, time_limit


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        # squeue's manual, %L: days-hours:minutes:seconds, of which only what is needed is shown.
        ("2-03:04:05", 2 * 86_400 + 3 * 3_600 + 4 * 60 + 5),
        ("23:59:59", 86_399),
        ("59:59", 3_599),
        ("0:00", 0),
        ("1-00:00:00", 86_400),
        ("UNLIMITED", None),
        ("NOT_SET", None),
        ("INVALID", None),
        ("", None),
    ],
)
def test_squeues_forms(text, seconds):
    assert slurm_seconds(text) == seconds


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
    """Makes a command of a scheduler's that runs a shell's line."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def make(name, body):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)

    return make


SLURM, SLURM_NEW = {"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "4102444800"}


def test_slurm_is_asked_only_where_it_has_not_said(scheduler):
    scheduler("squeue", '[ "$*" = "-h -j 7 -o %L" ] && echo "  1:00:00"')
    assert time_limit("auto", 5.0, SLURM) == (3_600, "squeue -j 7", True)
    limit = time_limit("auto", 5.0, SLURM_NEW)  # 2100-01-01
    assert limit.seconds == pytest.approx(4_102_444_800 - time.time(), abs=60)
    assert limit.line == "SLURM_JOB_END_TIME" and limit.ends_job


def test_pbs_is_asked_for_this_job(scheduler):
    started = time.ctime(time.time() - 600)
    text = PBS.replace("Thu Nov 26 10:00:00 2026", started)
    scheduler("qstat", f"[ \"$*\" = '-f 1234.pbs01' ] && cat <<'END'\n{text}\nEND")
    limit = time_limit("auto", 5.0, {"PBS_JOBID": "1234.pbs01"})
    assert limit.seconds == pytest.approx(3_000, abs=60)
    assert limit.line == "qstat -f 1234.pbs01" and limit.ends_job


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("echo UNLIMITED", "none, squeue -j 7 says UNLIMITED"),
        ("echo NOT_SET", "not known, as squeue -j 7 does not tell (NOT_SET); "),
        ("echo Socket timed out >&2; exit 1", "does not tell (Socket timed out); "),
        ("exec sleep 20", "does not tell (no answer within 1 s); "),
        (None, "does not tell (squeue: No such file or directory); "),
    ],
)
def test_a_limit_that_is_not_known_is_said_to_be(scheduler, body, words, monkeypatch):
    monkeypatch.setattr(walltime, "ASK_SECONDS", 1.0)
    if body is not None:
        scheduler("squeue", body)
    else:
        monkeypatch.setenv("PATH", "/nowhere")
    seconds, line, ends_job = time_limit("auto", 0.0, SLURM)
    assert (seconds, ends_job) == (None, False)
    assert words in line
    assert line.endswith("give train.time_limit=MINUTES") == ("not known" in line)


def test_a_users_own_limit_comes_before_the_schedulers():
    assert time_limit(1.5, 30.0, SLURM_NEW) == (60, "train.time_limit=1.5", False)
    assert time_limit(None, 30.0, SLURM_NEW).seconds is None
    assert time_limit("auto", 30.0, {}).seconds is None
