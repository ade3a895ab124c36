"""Starting a job again, inside its allocation, until it is done: `jaxgpt.launch --restarts`."""

import contextlib
import dataclasses
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import FrameType

from jaxgpt.cluster.environment import JOB, SUPERVISOR
from jaxgpt.cluster.hosts import reachable_name
from jaxgpt.cluster.launchers import ProcessLayout, launch_command, place_on
from jaxgpt.cluster.shutdown import BAD_USAGE, DONE, STOPPED
from jaxgpt.cluster.transport import keep_alive

MAX_FUTILE = 3  # tries in a row that begin no further on than the one before
END_SECONDS = 20.0  # for a launcher to end after process 0 has
PROBE_SECONDS = (
    180.0  # for a host to answer, which may have to read Python and JAX from a slow disk
)
FUTILE_WAIT = 10.0  # seconds before another try after a futile one, doubled each time
DONE_SECONDS = 300.0  # for a launcher to end after a run that was complete
# Statuses after which another try would end the same way, or nobody wants one.
FINAL = (DONE, BAD_USAGE, STOPPED, 128 + signal.SIGINT, 128 + signal.SIGPIPE)
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


class Supervisor:
    """One command, started on a layout's hosts again and again; `python` starts Python on one."""

    def __init__(
        self,
        layout: ProcessLayout,
        command: Sequence[str],
        restarts: int,
        python: Sequence[str] = (sys.executable,),
    ):
        self._layout, self._command, self._restarts = layout, list(command), restarts
        self._python = python
        self._good = [*layout.hosts, *layout.spares]
        self._listener = Listener("localhost" if layout.is_local else reachable_name())
        self._process: subprocess.Popen[bytes] | None = None
        self._signal: int | None = None
        self._asked_to_stop = threading.Event()

    def run(self) -> int:
        """Return the exit status of the last try."""
        for number in SIGNALS:
            signal.signal(number, self._pass_on)
        reached, futile = -1, 0
        for attempt in range(1, self._restarts + 2):
            began = time.monotonic()
            job = secrets.token_hex(8)
            status = self._try(job)
            seconds = time.monotonic() - began
            progress = self._listener.progress
            # Input that was good enough to train with is not what is bad: a disk or a device is.
            is_final = status in FINAL and not (status == BAD_USAGE and (progress or reached >= 0))
            if self._signal is not None:
                return status if status in FINAL or reached < 0 else STOPPED
            if is_final:
                return status
            gained = progress is not None and progress["resumed"] > reached
            reached = progress["resumed"] if progress is not None else reached
            futile = 0 if gained else futile + 1
            where = f" at step {progress['step']}" if progress else ", before a step"
            _say(f"try {attempt} ended with status {status} after {seconds:.0f} s{where}")
            if attempt > self._restarts:
                _say(f"--restarts {self._restarts}: no more tries")
                return status
            if futile == MAX_FUTILE:
                _say(
                    f"{MAX_FUTILE} tries in a row gained no step; read what they printed, or give "
                    "a smaller checkpoint.interval"
                )
                return status
            if futile and self._asked_to_stop.wait(FUTILE_WAIT * 2 ** (futile - 1)):
                return STOPPED if reached >= 0 else 128 + self._signal
            if not self._place_again(job, progress["run"] if progress else os.getcwd()):
                return status
            if self._signal is not None:
                return STOPPED if reached >= 0 else 128 + self._signal
        raise AssertionError("unreachable")

    def _try(self, job: str) -> int:
        """Start the command, and wait until all of it has ended."""
        environ = {**os.environ, SUPERVISOR: self._listener.expect(job), JOB: job}
        line = [*launch_command(self._layout, environ), *self._command]
        # A group of its own: a terminal's Ctrl-C comes by `_pass_on` alone, once.
        self._process = subprocess.Popen(
            line, stdin=subprocess.DEVNULL, env=environ, process_group=0
        )
        if self._signal is not None:  # while the line was made
            self._process.send_signal(signal.SIGUSR1)
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = self._process.wait(1)
                return status if status >= 0 else 128 - status
            if self._listener.is_overdue():
                _say("process 0 has ended, and its launcher does not; ended")
                os.killpg(self._process.pid, signal.SIGTERM)  # srun ends its step, given time
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(END_SECONDS)
                if self._process.poll() is None:
                    os.killpg(self._process.pid, signal.SIGKILL)

    def _place_again(self, job: str, directory: str) -> bool:
        """Choose hosts for the next try: those that are well. False if there are none."""
        before, began = self._layout, time.monotonic()
        problems = check_hosts(before, self._good, job, directory, self._python)
        for host, problem in problems.items():
            if problem is not None:
                _say(f"host {host} is left out: {problem}")
        self._good = [host for host, problem in problems.items() if problem is None]
        checked = f"{len(problems)} host{'s' * (len(problems) > 1)} checked in"
        _say(f"{checked} {time.monotonic() - began:.1f} s, {len(self._good)} well")
        if not self._good:
            _say("no host is well enough to go on")
            return False
        self._layout = place_on(before, self._good[: len(before.hosts)])
        if len(self._layout.hosts) < len(before.hosts):
            _say(f"no spare host is left; going on with {self._layout}")
        return True

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        again = number == signal.SIGINT and self._signal is not None
        self._signal = number
        self._asked_to_stop.set()
        if self._process is not None and self._process.poll() is None:
            # All launchers pass SIGUSR1 on. MPICH's dies of SIGUSR2; srun and Open MPI's mpirun end
            # all processes on SIGTERM, which is what a second Ctrl-C is for.
            self._process.send_signal(signal.SIGTERM if again else signal.SIGUSR1)


class Listener:
    """Where process 0 of a try says how far it has come, and is seen to end."""

    def __init__(self, host: str):
        self._server = socket.create_server(("", 0))
        self._address = f"{host}:{self._server.getsockname()[1]}"
        self._job = ""
        self._gone: float | None = None
        self._is_ending = False  # the run is complete, or saved: only its processes end
        self.progress: dict | None = None  # what it said last: run, resumed, step
        threading.Thread(target=self._accept, daemon=True).start()

    def expect(self, job: str) -> str:
        """Forget the last try; return the address for the next one."""
        self._job, self._gone, self._is_ending, self.progress = job, None, False, None
        return self._address

    def is_overdue(self) -> bool:
        """Return whether process 0 has gone for longer than a launcher takes to end."""
        gone, patience = self._gone, DONE_SECONDS if self._is_ending else END_SECONDS
        return gone is not None and time.monotonic() - gone > patience

    def _accept(self) -> None:
        while True:
            connection, _ = self._server.accept()
            threading.Thread(target=self._read, args=(connection,), daemon=True).start()

    def _read(self, connection: socket.socket) -> None:
        # A host that is lost says no goodbye: the kernel asks after 10 s, and gives up 15 s later.
        keep_alive(connection, TCP_KEEPIDLE=10, TCP_KEEPINTVL=5, TCP_KEEPCNT=3)
        job, not_ours = None, (OSError, ValueError, TypeError, KeyError, AttributeError)
        with contextlib.suppress(*not_ours), connection, connection.makefile() as lines:
            for line in lines:
                message = json.loads(line)
                job = message.pop("job")
                if job != self._job:
                    return
                self._gone, self._is_ending = None, message.pop("ending")
                self.progress = message
        if job is not None and job == self._job:
            self._gone = time.monotonic()


def check_hosts(
    layout: ProcessLayout, hosts: Sequence[str], job: str, directory: str, python: Sequence[str]
) -> dict[str, str | None]:
    """End what is left of `job` on each host, in parallel; return why one is unfit, or None."""
    probe = [*python, "-m", "jaxgpt.doctor.probe", job, directory]
    environ = {k: v for k, v in os.environ.items() if k not in (SUPERVISOR, JOB)}

    def check(host: str) -> str | None:
        line = probe
        if not layout.is_local:
            one = dataclasses.replace(place_on(layout, [host]), n_processes=1, per_host=1)
            line = [*launch_command(one, environ), *probe]
            if line[0] == "srun":  # what is left of the last try may hold the host's devices
                line[1:1] = ["--overlap"]
        return probed(line, environ)

    with ThreadPoolExecutor(len(hosts)) as pool:
        return dict(zip(hosts, pool.map(check, hosts), strict=True))


def probed(line: Sequence[str], environ: Mapping[str, str]) -> str | None:
    """Run a probe's command line; return the problem that it found, or its own."""
    process = subprocess.Popen(
        line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace", env=environ, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=PROBE_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return f"no answer within {PROBE_SECONDS:.0f} s"
    if process.returncode == 0:
        return None
    # The probe's own reason, or the first words of a launcher, or a remote shell, that failed.
    lines = [line for line in output.splitlines() if line.strip()] or [
        f"status {process.returncode}"
    ]
    own = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return [*own, *lines][0]


def _say(text: str) -> None:
    print(f"launch: {text}", file=sys.stderr, flush=True)
