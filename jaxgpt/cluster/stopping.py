"""Stopping a run after a step, on a signal or at a time limit."""

import atexit
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from jaxgpt.cluster.environment import SUPERVISOR
from jaxgpt.cluster.monitor import Monitor
from jaxgpt.cluster.shutdown import stop_signals, write_if_read
from jaxgpt.cluster.timeouts import COMMAND, DEBOUNCE, SAVE_MARGIN


class TimeLimit(NamedTuple):
    """Time limit of a run or of its job."""

    seconds: float | None = None  # from its creation; None if there is no limit or it is unknown
    line: str = ""  # source of the limit, or why there is none or it is unknown; for the log
    ends_job: bool = False  # whether the scheduler kills the job at the limit


def margin(seconds: float, save: float, step: float) -> float:
    """Return the time in seconds to reserve at the end of a job for saving a checkpoint.

    Up to three steps may already be dispatched, and one more may run before the processes agree to
    stop. The result is at most max(`seconds` / 4, 1.5 * `save`).

    Args:
        seconds: seconds to the end of the job when `time_limit` was called.
        save: duration of the slowest save so far, in seconds.
        step: duration of the slowest step so far, in seconds, including any evaluation or
            checkpoint.
    """
    return min(max(SAVE_MARGIN, 3 * save, save + 4 * step), max(seconds / 4, 1.5 * save))


class StopSignal:
    """Makes all processes stop after the same step, on a signal or at a time limit.

    A second Ctrl-C more than `DEBOUNCE` seconds after the first terminates the job with status 130,
    without saving a checkpoint. Repeating any other signal has no effect, because schedulers send
    some signals repeatedly.
    """

    def __init__(
        self,
        monitor: Monitor,
        limit: TimeLimit | None = None,
        sync_point: Callable[[int, bool], bool | None] = lambda step, requested: None,
    ):
        """Start catching signals; call this in the main thread.

        This starts the monitor's thread and, if there is a time limit, the process's alarm timer.

        Args:
            monitor: monitor whose thread receives the signals. Python's signal handlers would run
                only after the main thread has finished compiling.
            limit: the run's time limit on process 0; None on other processes, which log nothing.
            sync_point: function of a step and a boolean that says whether this process has just
                been asked to stop. It returns whether all processes stop after the step, or None in
                a single-process job.
        """
        self.reason: str | None = None
        # The caller replaces both functions once the log is open. `say` prints a line.
        # `outlive_reader` is called when a signal or the time limit stops the run.
        self.say = lambda line: write_if_read(f"{line}\n", sys.stderr)
        self.outlive_reader = lambda: None
        self._monitor, self._limit, self._sync_point = monitor, limit, sync_point
        self._forwarded, self._interrupted = False, 0.0
        self._began, self._step_began = time.monotonic(), None
        self._save_seconds = self._step_seconds = 0.0  # the longest so far
        self._pipe, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        monitor.watch_pipe(self._pipe, self._listen)
        self._signals = [*stop_signals(), signal.SIGALRM]  # the time limit sends ALRM
        for number in self._signals:
            signal.signal(number, lambda number, frame: None)
            # Ignore late signals. At exit, Python restores the default handlers, which would kill
            # the process.
            atexit.register(signal.signal, number, signal.SIG_IGN)
        self._set_alarm()

    def describe(self) -> str:
        """Return a log line: the time limit and its source, or why there is none or it is unknown.

        Call this on process 0, which has the limit.
        """
        seconds, source, ends_job = self._limit or TimeLimit()
        if seconds is None:
            return f"time limit: {source}"
        if not ends_job:
            return f"time limit: {source}: stopping at {self._clock(seconds)}"
        return (
            f"time limit: the job ends at {self._clock(seconds)} ({source}); stopping at "
            f"{self._clock(seconds - self._margin())}, {self._margin():.0f} s earlier"
        )

    def _clock(self, seconds: float) -> str:
        at = time.time() + self._began + seconds - time.monotonic()
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))

    def _margin(self) -> float:
        if self._limit is None or not self._limit.ends_job:
            return 0.0
        return margin(self._limit.seconds, self._save_seconds, self._step_seconds)

    def allow_for_save(self, seconds: float) -> None:
        """Reserve enough time at the end of the job for a checkpoint that takes `seconds`.

        Prints a line if this makes the run stop earlier. Does nothing if the time limit is not the
        end of the job.
        """
        self._learn(save=seconds)

    def _learn(self, save: float = 0.0, step: float = 0.0) -> None:
        before = self._margin()
        self._save_seconds = max(self._save_seconds, save)
        self._step_seconds = max(self._step_seconds, step)
        if self._margin() > before and self.reason is None:
            self._set_alarm()
            what = f"a checkpoint takes {save:.0f} s" if save else f"a step takes {step:.0f} s"
            self.say(f"{self.describe()}, because {what}")

    def _set_alarm(self) -> None:
        if self._limit is not None and self._limit.seconds is not None:
            at = self._began + self._limit.seconds - self._margin()
            signal.setitimer(signal.ITIMER_REAL, max(0.01, at - time.monotonic()))

    def _listen(self) -> None:
        for number in os.read(self._pipe, 64):
            if number in self._signals:
                self._receive(number)

    def _receive(self, number: int) -> None:
        now, again = time.monotonic(), self.reason is not None
        if number == signal.SIGINT:
            if self._interrupted and now - self._interrupted > DEBOUNCE:
                said = "second Ctrl-C: exits without a checkpoint\n"
                self._monitor.end_job(said, 128 + signal.SIGINT)
            self._interrupted = self._interrupted or now
        if again:
            return
        self.reason = "time limit" if number == signal.SIGALRM else signal.Signals(number).name
        if self._limit is not None:
            steps = "the steps in progress" if self._step_seconds else "the first step"
            leave = "Ctrl-C again" if number == signal.SIGINT else "Ctrl-C twice or SIGKILL"
            self.outlive_reader()
            hint = "" if SUPERVISOR in os.environ else f"; {leave} exits at once, without one"
            self.say(f"{self.reason}: stopping after {steps}, with a checkpoint{hint}")

    def reached(self, step: int) -> bool:
        """Return whether all processes have agreed to stop after `step`.

        All processes must call this once per step, with `step` = 1, 2, 3 and so on, even after a
        rewind.
        """
        now = time.monotonic()
        if self._step_began is not None:
            self._learn(step=now - self._step_began)
        self._step_began = now
        requested = self.reason is not None and not self._forwarded
        agreed = self._sync_point(step, requested)
        if agreed is None:
            return self.reason is not None
        self._forwarded |= requested
        return agreed


def time_limit(
    setting: float | str | None, passed: float, environ: Mapping[str, str] = os.environ
) -> TimeLimit:
    """Return the time limit, counted from now.

    Args:
        setting: train.time_limit: minutes since the process started, "auto" for the end of the
            scheduler's job, or None for no limit. In a PBS job, "auto" runs qstat.
        passed: seconds since the process started.
        environ: environment variables.

    Returns:
        The limit. Its `seconds` is None if there is no limit or the job's end is unknown, and
        negative if the limit has passed.
    """
    if setting != "auto":
        seconds = None if setting is None else 60.0 * setting - passed
        return TimeLimit(seconds, f"train.time_limit={setting}")
    if (end := environ.get("SLURM_JOB_END_TIME", "")).isdecimal():
        return TimeLimit(int(end) - time.time(), "SLURM_JOB_END_TIME", ends_job=True)
    if "SLURM_JOB_ID" in environ:
        problem = "SLURM_JOB_END_TIME is not set (Slurm 22.05 and later set it)"
    elif job := environ.get("PBS_JOBID"):
        answer, problem = ask("qstat", "-f", job)
        if (seconds := pbs_seconds(answer, time.time())) is not None:
            return TimeLimit(seconds, f"qstat -f {job}", ends_job=True)
        problem = f"qstat -f {job} does not report it ({problem or 'no walltime'})"
    else:
        return TimeLimit(None, "none, because this is not a PBS or Slurm job")
    return TimeLimit(
        None,
        f"unknown, because {problem}; set train.time_limit=MINUTES to save before the job ends",
    )


def pbs_seconds(text: str, now: float) -> float | None:
    """Return a job's remaining walltime in seconds at `now` (Unix time), or None if unknown.

    The result is negative if the job has exceeded its walltime. `text` is the output of `qstat -f`.
    It contains the job's start time, in local time, as `stime` (PBS Professional and OpenPBS) or
    `start_time` (Torque).
    """
    limit = re.search(r"^\s*Resource_List\.walltime = (\d+):(\d\d):(\d\d)\s*$", text, re.MULTILINE)
    start = re.search(r"^\s*(?:stime|start_time) = (.+?)\s*$", text, re.MULTILINE)
    if limit is None or start is None:
        return None
    try:
        began = time.mktime(time.strptime(start[1]))  # the format of ctime
    except ValueError:
        return None
    hours, minutes, seconds = map(int, limit.groups())
    return began + 3600 * hours + 60 * minutes + seconds - now


def ask(*command: str) -> tuple[str, str]:
    """Run a scheduler's command. Return (output, "") on success and ("", problem) on failure.

    The command fails if it cannot be started, exits with a nonzero status, or takes more than
    `COMMAND` seconds.
    """
    try:
        ran = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=COMMAND
        )
    except subprocess.TimeoutExpired:
        return "", f"no answer within {COMMAND:.0f} s"
    except OSError as error:
        return "", f"{command[0]}: {error.strerror}"
    if ran.returncode:
        return "", ran.stderr.strip()[:200] or f"status {ran.returncode}"
    return ran.stdout, ""
