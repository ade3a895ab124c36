"""Stopping a run between two steps: on a signal, or before a time limit."""

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from jaxgpt.cluster.health.walltime import TimeLimit
from jaxgpt.cluster.shutdown import end_process

# That stop a run after a step. Slurm sends USR1 or USR2 where sbatch was given --signal.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)
LEAST_MARGIN = 120.0  # seconds to save in, before a job is ended
DEBOUNCE = 2.0  # seconds in which a Ctrl-C may come twice: from the terminal and from a launcher


def margin(seconds: float, save: float, step: float) -> float:
    """Return how long before the end of a job to stop, so that a checkpoint is saved in time.

    A stop waits for the step under way, and for one more on which the processes agree. A short
    job keeps three quarters of its time to train, if a checkpoint fits into the rest.

    Args:
        seconds: until the job is ended, from the start of the run.
        save: the longest checkpoint so far, from the start of saving to its last file.
        step: the longest step so far, with what was due at it.
    """
    return min(max(LEAST_MARGIN, 3 * save, save + 2 * step), max(seconds / 4, 1.5 * save))


class StopSignal:
    """A signal or a time limit, turned into a step at which all processes stop."""

    def __init__(
        self,
        limit: TimeLimit | None = None,
        sync_point: Callable[[int, bool], bool | None] = lambda step, requested: None,
        leave: Callable[[str, int], Any] = lambda report, status: end_process(status),
    ):
        """Catch signals from now on.

        Args:
            limit: that of the run; None on other processes than 0, which say nothing.
            sync_point: takes a step and whether this process was first asked to stop before it,
                and returns whether all processes stop after it; None where this is the only one.
            leave: ends the job without a checkpoint, given a message and a status.
        """
        self.reason: str | None = None
        # Replaced once there is a log.
        self.say = lambda line: print(line, file=sys.stderr, flush=True)
        self._limit, self._sync_point, self._leave = limit, sync_point, leave
        self._forwarded, self._interrupted = False, 0.0
        self._began, self._step_began = time.monotonic(), None
        self._save_seconds = self._step_seconds = 0.0  # the longest so far
        read, write = os.pipe()
        os.set_blocking(write, False)
        # A signal's number is written to the pipe at once. Python itself would wait for what runs
        # outside of it, such as an hour of compiling.
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        threading.Thread(target=self._listen, args=(read,), name="signals", daemon=True).start()
        for number in SIGNALS:
            signal.signal(number, self._ignore)
            # Ignore what comes when all is done: Python would go back to being killed.
            atexit.register(signal.signal, number, signal.SIG_IGN)
        self._set_alarm()

    def describe(self) -> str:
        """Return a line about the time limit."""
        seconds, source, ends_job = self._limit or TimeLimit()
        if seconds is None:
            return f"time limit: {source}"
        if not ends_job:
            return f"time limit: {source}: stops at {self._clock(seconds)}"
        return (
            f"time limit: the job ends at {self._clock(seconds)}, by {source}; stops at "
            f"{self._clock(seconds - self._margin())}, {self._margin():.0f} s before"
        )

    def _clock(self, seconds: float) -> str:
        at = time.time() + self._began + seconds - time.monotonic()
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))

    def _margin(self) -> float:
        if self._limit is None or not self._limit.ends_job:
            return 0.0
        return margin(self._limit.seconds, self._save_seconds, self._step_seconds)

    def allow_for_save(self, seconds: float) -> None:
        """Leave time for a checkpoint that takes as long as one that took `seconds` in all."""
        self._learn(save=seconds)

    def _learn(self, save: float = 0.0, step: float = 0.0) -> None:
        before = self._margin()
        self._save_seconds = max(self._save_seconds, save)
        self._step_seconds = max(self._step_seconds, step)
        if self._margin() > before and self.reason is None:
            self._set_alarm()
            what = f"a checkpoint takes {save:.0f} s" if save else f"a step takes {step:.0f} s"
            self.say(f"{self.describe()}, as {what}")

    def _set_alarm(self) -> None:
        if self._limit is not None and self._limit.seconds is not None:
            at = self._began + self._limit.seconds - self._margin()
            signal.setitimer(signal.ITIMER_REAL, max(0.01, at - time.monotonic()))

    def _ignore(self, number: int, frame: FrameType | None) -> None:
        """Take the place of a handler that would end the process."""

    def _listen(self, pipe: int) -> None:
        while True:
            for number in os.read(pipe, 64):
                if number in SIGNALS:
                    self._receive(number)

    def _receive(self, number: int) -> None:
        now, again = time.monotonic(), self.reason is not None
        if number == signal.SIGINT:
            if self._interrupted and now - self._interrupted > DEBOUNCE:
                self._leave("", 128 + signal.SIGINT)
            self._interrupted = self._interrupted or now
        if again:
            return
        self.reason = "time limit" if number == signal.SIGALRM else signal.Signals(number).name
        if self._limit is not None:
            step = "the step under way" if self._step_began is not None else "the first step"
            leave = "; Ctrl-C again leaves at once, without one" if number == signal.SIGINT else ""
            self.say(f"{self.reason}: stops after {step}, with a checkpoint{leave}")

    def reached(self, step: int) -> bool:
        """Return whether all processes stop after `step`, the furthest one's when it was asked."""
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
