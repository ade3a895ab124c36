"""The command line that started the job, and the process that runs it on this host."""

import contextlib
import os
import shlex
from collections.abc import Mapping
from pathlib import Path

LAUNCH_LINE = "JAXGPT_LAUNCH_LINE"  # set by jaxgpt.launch
MPIEXEC = ("mpiexec", "mpiexec.hydra", "mpirun", "orterun", "prterun", "torchrun")


def launch_line(environ: Mapping[str, str]) -> str | None:
    """Return the command line that started this job, quoted for a shell; None if it is unknown.

    It is known if jaxgpt.launch started the job, or a launcher in `MPIEXEC` that runs on this host.
    """
    if LAUNCH_LINE in environ:
        return environ[LAUNCH_LINE]
    process = find_mpiexec_process()
    with contextlib.suppress(OSError):  # it has exited
        return None if process is None else shlex.join(_command(process))
    return None


def find_mpiexec_process() -> int | None:
    """Return the process ID of the launcher in `MPIEXEC` that started this process, or None.

    None means that there is no such ancestor on this host, or that this host has no /proc.
    """
    process = os.getppid()
    with contextlib.suppress(OSError):  # no /proc, or a process that has exited
        while process > 1:
            # The second word is the name if the mpiexec is a script.
            if any(Path(word).name in MPIEXEC for word in _command(process)[:2]):
                return process
            status = Path(f"/proc/{process}/stat").read_text(errors="replace")
            process = int(status.rpartition(")")[2].split()[1])  # the parent
    return None


def _command(process: int) -> list[str]:
    """Return the command line of a process; raise `OSError` if it has exited."""
    text = Path(f"/proc/{process}/cmdline").read_text(errors="replace")
    return text.removesuffix("\0").split("\0")
