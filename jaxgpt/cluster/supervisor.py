"""Starting a job again, inside its allocation, until it is done: `jaxgpt.launch --restarts`."""

import asyncio
import dataclasses
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from jaxgpt.cluster.environment import JOB, SUPERVISOR
from jaxgpt.cluster.hosts import reachable_name
from jaxgpt.cluster.launchers import Launcher, ProcessLayout, place_on
from jaxgpt.cluster.monitor import keep_alive
from jaxgpt.cluster.shutdown import BAD_USAGE, DONE, STOPPED, nobody_reads
from jaxgpt.cluster.timeouts import COMMAND, RETRY, SLOW_DISK

# Statuses after which another try would end the same way, or nobody wants one.
FINAL = (DONE, BAD_USAGE, STOPPED, 128 + signal.SIGINT)
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


class Supervisor:
    """One command, started on a layout's hosts again and again."""

    def __init__(
        self,
        layout: ProcessLayout,
        launcher: Launcher,
        command: Sequence[str],
        restarts: int,
        give_up_after: int = 3,
    ):
        """Prepare.

        Args:
            layout: where processes go in the first try.
            launcher: builds the command line that starts them.
            command: what each process runs.
            restarts: tries after the first one, at most.
            give_up_after: tries in a row without a new checkpoint, after which no other follows; 0
                is never.
        """
        self._layout, self._launcher, self._command = layout, launcher, list(command)
        self._restarts, self._give_up_after = restarts, give_up_after
        self._good = [*layout.hosts, *layout.spares]
        self._process: asyncio.subprocess.Process | None = None
        self._signal: int | None = None
        # What process 0 of a try says.
        self._job = ""
        self._progress: dict | None = None  # what `SupervisorLink` says
        self._is_ending = False  # the run is complete, or saved: only its processes end
        self._gone: float | None = None  # when it was seen to end

    def run(self) -> int:
        """Return the exit status of the last try."""
        return asyncio.run(self._run())

    async def _run(self) -> int:
        self._asked_to_stop = asyncio.Event()
        for number in SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._pass_on, number)
        listener = socket.create_server(("", 0))
        host = "localhost" if self._layout.is_local else reachable_name()
        self._address = f"{host}:{listener.getsockname()[1]}"
        await asyncio.start_server(self._hear, sock=listener)
        has_trained, saved, futile = False, 0, 0  # saved: step of the newest checkpoint
        for attempt in range(1, self._restarts + 2):
            began = time.monotonic()
            status = await self._try()
            seconds = time.monotonic() - began
            progress, is_newer = self._progress, False
            if progress is not None:
                is_newer = progress["saved"] > (saved if has_trained else progress["resumed"])
                has_trained, saved = True, progress["saved"]
            # Input that was good enough to train with is not what is bad: a disk or a device is.
            if status in FINAL and not (status == BAD_USAGE and has_trained):
                return status
            if status == 128 + signal.SIGPIPE and nobody_reads():  # as after `| head`
                return status
            if self._signal is not None:
                return STOPPED if saved else status
            futile = 0 if is_newer else futile + 1
            where = f" at step {progress['step']}" if progress else ", before a step"
            _say(f"try {attempt} ended with status {status} after {seconds:.0f} s{where}")
            if attempt > self._restarts:
                _say(f"--restarts {self._restarts}: no more tries")
                return status
            if futile and futile == self._give_up_after:
                _say(
                    f"--give-up-after {futile}: no new checkpoint in so many tries; read what they "
                    "printed, or give a smaller checkpoint.interval"
                )
                return status
            if futile:
                await self._wait(RETRY * 2 ** (min(futile, 6) - 1))
            directory = progress["run"] if progress else os.getcwd()
            if self._signal is None and not await self._place_again(directory):
                return status
            if self._signal is not None:
                return STOPPED if saved else 128 + self._signal
        raise AssertionError("unreachable")

    async def _try(self) -> int:
        """Start the command, and wait until all of it has ended."""
        self._job, self._gone = secrets.token_hex(8), None
        self._is_ending, self._progress = False, None
        environ = {**os.environ, SUPERVISOR: self._address, JOB: self._job}
        line = [*self._launcher(self._layout, environ), *self._command]
        # A group of its own: a terminal's Ctrl-C comes by `_pass_on` alone, once.
        self._process = await asyncio.create_subprocess_exec(
            *line, stdin=subprocess.DEVNULL, env=environ, process_group=0
        )
        if self._signal is not None:  # while the line was made
            self._process.send_signal(signal.SIGUSR1)
        ended = asyncio.create_task(self._process.wait())
        while not (await asyncio.wait([ended], timeout=1))[0]:
            patience = SLOW_DISK if self._is_ending else COMMAND
            if self._gone is not None and time.monotonic() - self._gone > patience:
                _say("process 0 has ended, and its launcher does not; ended")
                os.killpg(self._process.pid, signal.SIGTERM)  # srun ends its step, given time
                if not (await asyncio.wait([ended], timeout=COMMAND))[0]:
                    os.killpg(self._process.pid, signal.SIGKILL)
        return ended.result() if ended.result() >= 0 else 128 - ended.result()

    async def _hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Note how far process 0 of a try has come, until it ends."""
        keep_alive(writer)
        job = None
        try:
            while line := await reader.readline():
                message = json.loads(line)
                job = message.pop("job")
                if job != self._job:
                    break
                self._gone, self._is_ending = None, message.pop("ending")
                self._progress = message
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            pass  # its host is lost, or it is none of ours
        writer.close()
        if job is not None and job == self._job:
            self._gone = time.monotonic()

    async def _wait(self, seconds: float) -> None:
        """Wait, unless the job is asked to stop."""
        await asyncio.wait([asyncio.create_task(self._asked_to_stop.wait())], timeout=seconds)

    async def _place_again(self, directory: str) -> bool:
        """Choose hosts for the next try: those that are well. False if there are none."""
        before, began = self._layout, time.monotonic()
        problems = await check_hosts(before, self._launcher, self._good, self._job, directory)
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

    def _pass_on(self, number: int) -> None:
        again = number == signal.SIGINT and self._signal is not None
        self._signal = number
        self._asked_to_stop.set()
        if self._process is not None and self._process.returncode is None:
            # All launchers pass SIGUSR1 on. MPICH's dies of SIGUSR2; srun and Open MPI's mpirun end
            # all processes on SIGTERM, which is what a second Ctrl-C is for.
            self._process.send_signal(signal.SIGTERM if again else signal.SIGUSR1)


async def check_hosts(
    layout: ProcessLayout, launcher: Launcher, hosts: Sequence[str], job: str, directory: str
) -> dict[str, str | None]:
    """End what is left of `job` on each host, in parallel; return why one is unfit, or None."""
    probe = [sys.executable, "-m", "jaxgpt.doctor.probe", job, directory]
    environ = {k: v for k, v in os.environ.items() if k not in (SUPERVISOR, JOB)}
    lines = []
    for host in hosts:
        line = probe
        if not layout.is_local:
            one = dataclasses.replace(place_on(layout, [host]), n_processes=1, per_host=1)
            line = [*launcher(one, environ), *probe]
            if line[0] == "srun":  # what is left of the last try may hold the host's devices
                line[1:1] = ["--overlap"]
        lines.append(line)
    found = await asyncio.gather(*(probed(line, environ) for line in lines))
    return dict(zip(hosts, found, strict=True))


async def probed(line: Sequence[str], environ: Mapping[str, str]) -> str | None:
    """Run a probe's command line; return the problem that it found, or its own."""
    process = await asyncio.create_subprocess_exec(
        *line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env=environ, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = await asyncio.wait_for(process.communicate(), SLOW_DISK)
    except TimeoutError:
        os.killpg(process.pid, signal.SIGKILL)
        return f"no answer within {SLOW_DISK:.0f} s"
    if process.returncode == 0:
        return None
    # The probe's own reason, or the first words of a launcher, or a remote shell, that failed.
    printed = output.decode(errors="replace").splitlines()
    lines = [line for line in printed if line.strip()] or [f"status {process.returncode}"]
    own = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return [*own, *lines][0]


def _say(text: str) -> None:
    print(f"launch: {text}", file=sys.stderr, flush=True)
