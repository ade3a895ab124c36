"""The command line that started the job."""

import contextlib
import os
import shlex
from collections.abc import Mapping
from pathlib import Path

LAUNCH_LINE = "JAXGPT_LAUNCH_LINE"  # set by jaxgpt.launch
MPIEXEC = ("mpiexec", "mpiexec.hydra", "mpirun", "orterun", "prterun", "torchrun")


def launch_line(environ: Mapping[str, str]) -> str | None:
    """Return the shell-quoted command line that started this job, or None if it is unknown.

    It is known if jaxgpt.launch started the job, or if `find_mpiexec` finds a launcher.
    """
    if LAUNCH_LINE in environ:
        return environ[LAUNCH_LINE]
    found = find_mpiexec()
    return None if found is None else shlex.join(found[1])


def find_mpiexec() -> tuple[int, list[str]] | None:
    """Return the process ID and the command line of the launcher that started this process.

    Returns None if /proc is missing or shows no ancestor process with a name in `MPIEXEC`.
    """
    process = os.getppid()
    with contextlib.suppress(OSError):  # no /proc, or a process that has exited
        while process > 0:
            folder = Path(f"/proc/{process}")
            words = (folder / "cmdline").read_text(errors="replace").removesuffix("\0").split("\0")
            # If mpiexec is a script, its name is the second word.
            if any(Path(word).name in MPIEXEC for word in words[:2]):
                return process, words
            status = (folder / "stat").read_text(errors="replace")
            process = int(status.rpartition(")")[2].split()[1])  # the parent
    return None
