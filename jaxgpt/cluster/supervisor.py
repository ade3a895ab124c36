"""Restarting a job within its allocation until it is done, for `jaxgpt.launch --restarts`."""

import asyncio
import json
import os
import secrets
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jaxgpt.cluster.environment import JOB, JOB_START, SUPERVISOR
from jaxgpt.cluster.hosts import reachable_name
from jaxgpt.cluster.launch_line import LAUNCH_LINE
from jaxgpt.cluster.launchers import Launcher, ProcessLayout, place_on
from jaxgpt.cluster.monitor import keep_alive
from jaxgpt.cluster.process_group import listen
from jaxgpt.cluster.shutdown import BAD_USAGE, DONE, STDERR, STOPPED, nobody_reads, stop_signals
from jaxgpt.cluster.timeouts import COMMAND, RETRY, SETTLE, SLOW_DISK

# Exit statuses after which a restart is useless or unwanted.
FINAL = (DONE, BAD_USAGE, STOPPED, 128 + signal.SIGINT)


@dataclass
class Attempt:
    """State of one attempt to run the command."""

    job: str = field(default_factory=lambda: secrets.token_hex(8))
    progress: dict[str, Any] | None = None  # newest message from `SupervisorLink`
    link: asyncio.StreamWriter | None = None  # connection that sent `progress`
    is_ending: bool = False  # whether the run has ended and its processes are exiting
    # When the launcher should have exited; None while process 0 is connected.
    deadline: float | None = None


class Supervisor:
    """Runs a command on the hosts of a job, and restarts it until it is done or `run` gives up."""

    def __init__(
        self,
        layout: ProcessLayout,
        launcher: Launcher,
        command: Sequence[str],
        restarts: int,
        give_up_after: int = 3,
    ):
        """Create a supervisor without starting the command.

        Args:
            layout: hosts and processes of the first attempt.
            launcher: function that builds the launch command.
            command: command that each process runs.
            restarts: maximum number of attempts after the first one.
            give_up_after: maximum number of consecutive attempts without a new checkpoint; 0 means
                no limit. A probe that finds no healthy host counts as an attempt.
        """
        self._layout, self._launcher, self._command = layout, launcher, list(command)
        is_python = os.path.basename(command[0]).startswith("python")
        self._ends_with_training = is_python or "jaxgpt.train" in command
        self._restarts, self._give_up_after = restarts, give_up_after
        self._good = [*layout.hosts, *layout.spares]
        self._process: asyncio.subprocess.Process | None = None
        self._signal: int | None = None
        self._kills: asyncio.Task[None] | None = None  # after a second Ctrl-C
        self._attempt = Attempt()

    def run(self) -> int:
        """Run the command until it is done or the supervisor gives up. Return an exit status.

        This is the status of the last attempt (128 + N if signal N killed its launcher). There are
        four exceptions if the supervisor has received a signal:

        - If Ctrl-C follows an earlier signal, the status is 130 or 75.
        - If the newest progress report includes a checkpoint, every status except 0, 130 and 141
          (after `| head`) is replaced with 75.
        - If no attempt has reported progress, every status except 0, 2, 75, 130 and 141 (after
          `| head`) is replaced with 128 plus the signal's number.
        - If the signal arrives between two attempts and the newest report includes no checkpoint,
          the status is 128 plus the signal's number.

        Call this in the main thread. Any of `stop_signals` is forwarded to the launcher as SIGUSR1,
        but Ctrl-C after an earlier signal terminates all processes. Raises `OSError` if the
        launcher cannot be started, and `PeerLost` if no port is free.
        """
        return asyncio.run(self._run())

    async def _run(self) -> int:
        self._asked_to_stop = asyncio.Event()
        for number in stop_signals():
            asyncio.get_running_loop().add_signal_handler(number, self._forward_signal, number)
        listener = listen(":0")
        host = "localhost" if self._layout.is_local else reachable_name()
        self._address = f"{host}:{listener.getsockname()[1]}"
        await asyncio.start_server(self._receive_progress, sock=listener)
        has_trained, saved, futile = False, 0, 0  # saved: step of the newest checkpoint
        directory = ""  # the run directory; unknown until an attempt has started training
        for attempt in range(1, self._restarts + 2):
            began = time.monotonic()
            status = await self._run_attempt()
            seconds = time.monotonic() - began
            progress, is_newer = self._attempt.progress, False
            if progress is not None:
                is_newer = progress["saved"] > (saved if has_trained else progress["resumed"])
                has_trained, saved, directory = True, progress["saved"], progress["run"]
            # Once training has started, BAD_USAGE means a failed disk or device, not bad input.
            if self._kills and status != STOPPED:  # mpiexec may exit with any status, even 0
                return 128 + signal.SIGINT
            if status in FINAL and not (status == BAD_USAGE and has_trained):
                return status
            if status == 128 + signal.SIGPIPE and nobody_reads():  # as after `| head`
                return status
            if self._signal is not None:
                return STOPPED if saved else status if has_trained else 128 + self._signal
            futile = 0 if is_newer else futile + 1
            where = f" at step {progress['step']}" if progress else ", before the first step"
            _say(f"attempt {attempt} ended with status {status} after {seconds:.0f} s{where}")
            if attempt > self._restarts:
                _say(f"--restarts {self._restarts}: no attempts left")
                return status
            is_ready = False
            while not is_ready:
                if futile and futile == self._give_up_after:
                    _say(
                        f"--give-up-after {futile}: no new checkpoint after {futile} failures; "
                        "read the output above, or set a smaller checkpoint.interval"
                    )
                    return status
                if futile:
                    await self._unless_stopped(asyncio.sleep(RETRY * 2 ** (min(futile, 6) - 1)))
                if self._signal is None:
                    is_ready = await self._choose_hosts(directory)
                if self._signal is not None:
                    return STOPPED if saved else 128 + self._signal
                futile += not is_ready  # counts as a failed attempt
            os.environ[JOB_START] = f"{time.time():.3f}"  # so that start-up times are this start's
            _say(f"restart {attempt} of {self._restarts}")
        raise AssertionError("unreachable")

    async def _run_attempt(self) -> int:
        """Start the command, wait until its launcher has exited, and return the exit status."""
        attempt = self._attempt = Attempt()
        environ = {**os.environ, SUPERVISOR: self._address, JOB: attempt.job}
        line = [*self._launcher(self._layout, environ), *self._command]
        environ[LAUNCH_LINE] = shlex.join(line)
        _say(environ[LAUNCH_LINE])
        # Use a new process group, so that Ctrl-C reaches the job only through `_forward_signal`.
        self._process = await asyncio.create_subprocess_exec(
            *line, stdin=subprocess.DEVNULL, env=environ, process_group=0
        )
        if self._signal is not None:  # a signal arrived before the process started
            self._process.send_signal(signal.SIGUSR1)
        ended = asyncio.create_task(self._process.wait())
        while not (await asyncio.wait([ended], timeout=1))[0]:
            is_over = attempt.deadline is not None and time.monotonic() > attempt.deadline
            if is_over and self._ends_with_training:  # a script may go on
                _say("process 0 is gone, but its launcher has not exited; killing the launcher")
                os.killpg(self._process.pid, signal.SIGTERM)  # lets srun end its step
                if not (await asyncio.wait([ended], timeout=COMMAND))[0]:
                    os.killpg(self._process.pid, signal.SIGKILL)
        return ended.result() if ended.result() >= 0 else 128 - ended.result()

    async def _receive_progress(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Record the progress reported by process 0 until it disconnects."""
        keep_alive(writer)
        attempt, is_lost = self._attempt, False
        try:
            while line := await reader.readline():
                message = json.loads(line)
                if message.pop("job") != attempt.job:
                    break
                attempt.is_ending = message.pop("ending")
                attempt.progress, attempt.link, attempt.deadline = message, writer, None
        except TimeoutError:  # process 0 is lost with its host, or will connect again
            is_lost = True
        except (OSError, ValueError, TypeError, KeyError, AttributeError, asyncio.CancelledError):
            pass  # process 0 was killed, another program connected, or the supervisor exits
        writer.close()
        if attempt.link is writer:  # process 0 has not connected again
            patience = SLOW_DISK if attempt.is_ending or is_lost else COMMAND
            attempt.deadline = time.monotonic() + patience

    async def _unless_stopped(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Return the result of `work`. If a signal arrives first, cancel it and return None."""
        task, stop = asyncio.create_task(work), asyncio.create_task(self._asked_to_stop.wait())
        await asyncio.wait([task, stop], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        task.cancel()
        await asyncio.wait([task])
        return None

    async def _choose_hosts(self, directory: str) -> bool:
        """Choose healthy hosts for the next attempt. Return False if there are none.

        In that case, no host is excluded, because the cause may be a short outage of the shared
        file system. The result is also False if a signal arrives.
        """
        before, began = self._layout, time.monotonic()
        problems = await self._unless_stopped(
            check_hosts(before, self._launcher, self._good, self._attempt.job, directory)
        )
        if problems is None:
            return False
        healthy = [host for host, problem in problems.items() if problem is None]
        for host, problem in problems.items():
            if problem is not None:
                _say(f"{'excluding host' if healthy else 'host'} {host}: {problem}")
        checked = f"{len(problems)} host{'s' * (len(problems) > 1)} checked in"
        _say(f"{checked} {time.monotonic() - began:.1f} s, {len(healthy)} healthy")
        if not healthy:
            _say("no host is healthy, so none is excluded")
            return False
        self._good = healthy
        self._layout = place_on(before, self._good[: len(before.hosts)])
        if len(self._layout.hosts) < len(before.hosts):
            _say(f"no spare host is left; continuing with {self._layout}")
        return True

    def _forward_signal(self, number: int) -> None:
        again = number == signal.SIGINT and self._signal is not None
        self._signal = number
        self._asked_to_stop.set()
        if self._process is None:
            return
        name = signal.Signals(number).name
        if self._process.returncode is not None:
            _say(f"{name}: no attempt is running, so the job ends now")
        elif not again:
            # All launchers forward SIGUSR1, but SIGUSR2 kills MPICH's mpiexec.
            leave = "Ctrl-C again" if number == signal.SIGINT else "Ctrl-C"
            _say(f"{name}: stops the run with SIGUSR1; {leave} ends it at once")
            self._process.send_signal(signal.SIGUSR1)
        elif self._kills is None:
            _say("second Ctrl-C: terminating all processes without a checkpoint")
            self._kills = asyncio.create_task(self._kill_processes())

    async def _kill_processes(self) -> None:
        """Make the launcher terminate all processes, as a second Ctrl-C should.

        srun and Open MPI's mpirun do this on SIGTERM, and MPICH's mpiexec does it on a second
        SIGINT.
        """
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGINT):
            if self._process.returncode is None:
                self._process.send_signal(number)
            await asyncio.sleep(SETTLE)


async def check_hosts(
    layout: ProcessLayout, launcher: Launcher, hosts: Sequence[str], job: str, directory: str
) -> dict[str, str | None]:
    """Probe all `hosts` in parallel, and kill leftover processes of `job` on each host.

    A host is healthy if it has /proc, the leftover processes exit, `directory` is writable (not
    tested if it is ""), JAX finds its devices and can use them, and the probe ends within
    `SLOW_DISK` seconds. Returns a dict that maps each host name to the host's problem, or to None
    if the host is healthy. Raises `OSError` if the launcher cannot be started.
    """
    probe = [sys.executable, "-m", "jaxgpt.doctor.probe", job, directory]
    environ = {k: v for k, v in os.environ.items() if k not in (SUPERVISOR, JOB)}
    lines = []
    for host in hosts:
        line = probe
        if not layout.is_local:
            one = replace(place_on(layout, [host]), n_processes=1, per_host=1)
            line = [*launcher(one, environ), *probe]
            if line[0] == "srun":  # leftover processes may still hold the devices
                line[1:1] = ["--overlap"]
        lines.append(line)
    found = await asyncio.gather(*(_run_probe(line, environ) for line in lines))
    return dict(zip(hosts, found, strict=True))


async def _run_probe(line: Sequence[str], environ: Mapping[str, str]) -> str | None:
    """Run a probe. Return the reason for its failure, or None if it succeeded.

    A probe that takes more than `SLOW_DISK` seconds is killed and counts as failed. It is also
    killed if this coroutine is cancelled.
    """
    process = await asyncio.create_subprocess_exec(
        *line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env=environ, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = await asyncio.wait_for(process.communicate(), SLOW_DISK)
    except TimeoutError:
        return f"no answer within {SLOW_DISK:.0f} s"
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            # A process that waits for a hung file system does not exit now.
            await asyncio.wait([asyncio.create_task(process.communicate())], timeout=SETTLE)
    if process.returncode == 0:
        return None
    # If the probe printed no error message, return the first line of the output, which is from the
    # launcher or the remote shell.
    printed = output.decode(errors="replace").splitlines()
    lines = [line for line in printed if line.strip()] or [f"status {process.returncode}"]
    own = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return [*own, *lines][0]


def _say(text: str) -> None:
    try:
        print(f"launch: {text}", file=sys.stderr, flush=True)
    except OSError:  # the terminal is closed, or the reader of a pipe has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), STDERR)
