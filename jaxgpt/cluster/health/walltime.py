"""The time limit of a run: its own, or that of its job under PBS or Slurm."""

import os
import re
import subprocess
import time
from collections.abc import Mapping
from typing import NamedTuple

ASK_SECONDS = 20.0  # for a scheduler's command to answer


class TimeLimit(NamedTuple):
    """The seconds that are left, None without a limit, and a line for the log."""

    seconds: float | None = None
    line: str = ""
    ends_job: bool = False  # what is not on disk by then is lost


def time_limit(
    setting: float | str | None, passed: float, environ: Mapping[str, str] = os.environ
) -> TimeLimit:
    """Return the limit that train.time_limit sets, `passed` seconds after the process began."""
    if setting != "auto":
        seconds = None if setting is None else 60.0 * setting - passed
        return TimeLimit(seconds, f"train.time_limit={setting}")
    if job := environ.get("SLURM_JOB_ID"):
        return _slurm_limit(job, environ)
    if job := environ.get("PBS_JOBID"):
        answer, problem = _ask("qstat", "-f", job)
        return _job_limit(f"qstat -f {job}", pbs_seconds(answer, time.time()), problem)
    return TimeLimit(None, "none, as this is no job of PBS or Slurm")


def _slurm_limit(job: str, environ: Mapping[str, str]) -> TimeLimit:
    """Return what sbatch put in SLURM_JOB_END_TIME (Slurm 22.05 and later), or squeue says."""
    if (end := environ.get("SLURM_JOB_END_TIME", "")).isdecimal():
        return _job_limit("SLURM_JOB_END_TIME", int(end) - time.time(), "")
    answer, problem = _ask("squeue", "-h", "-j", job, "-o", "%L")
    text = answer.strip()
    if text == "UNLIMITED":
        return TimeLimit(None, f"none, squeue -j {job} says {text}")
    return _job_limit(f"squeue -j {job}", slurm_seconds(text), problem or text)


def _job_limit(source: str, seconds: float | None, problem: str) -> TimeLimit:
    if seconds is not None:
        return TimeLimit(seconds, source, ends_job=True)
    return TimeLimit(
        None,
        f"not known, as {source} does not tell ({problem or 'no walltime'}); to save before the "
        "job is ended, give train.time_limit=MINUTES",
    )


def slurm_seconds(text: str) -> float | None:
    """Read squeue's [days-][[hours:]minutes:]seconds; None for UNLIMITED and such."""
    if not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", text):
        return None
    days, _, clock = text.rpartition("-")
    seconds = 0
    for part in clock.split(":"):
        seconds = 60 * seconds + int(part)
    return 86_400.0 * int(days or 0) + seconds


def pbs_seconds(text: str, now: float) -> float | None:
    """Read `qstat -f`: what is left of the walltime at `now`, in Unix seconds.

    The job started at `stime` (PBS Professional and OpenPBS) or `start_time` (Torque), local time.
    """
    limit = re.search(r"^\s*Resource_List\.walltime = (\d+):(\d\d):(\d\d)\s*$", text, re.MULTILINE)
    start = re.search(r"^\s*(?:stime|start_time) = (.+?)\s*$", text, re.MULTILINE)
    if limit is None or start is None:
        return None
    try:
        began = time.mktime(time.strptime(start[1]))  # as ctime writes it
    except ValueError:
        return None
    hours, minutes, seconds = map(int, limit.groups())
    return began + 3600 * hours + 60 * minutes + seconds - now


def _ask(*command: str) -> tuple[str, str]:
    """Return what a scheduler's command prints, or nothing and the problem."""
    try:
        ran = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=ASK_SECONDS
        )
    except subprocess.TimeoutExpired:
        return "", f"no answer within {ASK_SECONDS:.0f} s"
    except OSError as error:
        return "", f"{command[0]}: {error.strerror}"
    return ("", ran.stderr.strip()[:200] or "status 1") if ran.returncode else (ran.stdout, "")
