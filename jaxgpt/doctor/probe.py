"""Check whether a host can run another attempt: `python -m jaxgpt.doctor.probe JOB DIRECTORY`.

The probe kills leftover processes of the job, then tests the run's file system (unless DIRECTORY is
empty) and each device.
"""

import contextlib
import os
import platform
import signal
import sys
import tempfile
import time
from pathlib import Path

from jaxgpt.cluster.environment import JOB
from jaxgpt.cluster.hardware import accelerator_expected
from jaxgpt.cluster.shutdown import job_exit_handler
from jaxgpt.cluster.timeouts import ANSWER
from jaxgpt.config import UsageError


def main(argv: list[str] | None = None) -> None:
    job, directory = sys.argv[1:] if argv is None else argv
    with job_exit_handler():
        _end_leftovers(job)
        if directory:  # otherwise, no run directory is known yet
            _check_directory(Path(directory))
        check_devices()


def _end_leftovers(job: str) -> None:
    """Kill the processes on this host that remain from the last attempt of the job `job`.

    Raises `UsageError` if one of them is still running after `ANSWER` seconds.
    """
    deadline = time.monotonic() + ANSWER
    while left := processes_of(job):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):  # it has already exited
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise UsageError(f"process {left[0]} of the last attempt cannot be killed")
        time.sleep(0.05)


def processes_of(job: str) -> list[int]:
    """Return the IDs of other processes on this host that were started with JAXGPT_JOB=`job`.

    Processes whose environment this user cannot read are ignored. Raises `OSError` if there is
    no /proc.
    """
    marker, found = f"{JOB}={job}".encode(), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):  # it has exited, or belongs to another user
                if marker in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def _check_directory(directory: Path) -> None:
    """Write, read and remove a file; raise `UsageError` if that fails."""
    try:
        with tempfile.NamedTemporaryFile(dir=directory) as file:
            file.write(b"probe")
            file.flush()
            os.fsync(file.fileno())
            Path(file.name).read_bytes()
    except OSError as error:
        raise UsageError(f"{directory}: cannot be written to ({error.strerror or error})") from None


def check_devices() -> None:
    """Run a computation on each of this process's devices.

    Raises `UsageError` if JAX or a device fails, or if accelerators are expected but JAX uses CPUs.
    """
    import jax
    import jax.numpy as jnp

    try:
        for device in jax.local_devices():
            jax.block_until_ready(jax.device_put(jnp.arange(8), device) + 1)
    except (RuntimeError, AssertionError) as error:  # an AssertionError has no message
        line = str(error).partition("\n")[0] or "no such devices"
        raise UsageError(f"the devices of {platform.node()} do not respond: {line}") from None
    if accelerator_expected() and jax.default_backend() == "cpu":
        raise UsageError(f"JAX found none of the accelerators of {platform.node()}")


if __name__ == "__main__":
    main()
