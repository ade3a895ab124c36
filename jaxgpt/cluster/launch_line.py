"""The command line that started the job."""

import contextlib
import os
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

# Set by jaxgpt.launch: the command line that it executes, and its own command line up to the word
# `python` in COMMAND.
LAUNCH_LINE = "JAXGPT_LAUNCH_LINE"
LAUNCH_PREFIX = "JAXGPT_LAUNCH_PREFIX"
MPIEXEC = ("mpiexec", "mpiexec.hydra", "mpirun", "orterun", "prterun", "torchrun")


def launch_line(environ: Mapping[str, str]) -> str | None:
    """Return the shell-quoted command line that started this job, or None if it is unknown.

    It is known if jaxgpt.launch started the job (with Open MPI, only on the launcher's host), or if
    `find_launcher_process` finds a launcher.
    """
    if LAUNCH_LINE in environ:
        return environ[LAUNCH_LINE]
    found = find_launcher_process()
    return None if found is None else shlex.join(found[1])


def launch_prefix(environ: Mapping[str, str]) -> str:
    """Return the words to type before `python` to start a program the way this job was started.

    An example is `mpiexec -n 8 `, with a trailing space. Without jaxgpt.launch, the result is empty
    if the launcher is unknown, or if the launcher's command line does not contain `python`, as with
    torchrun.
    """
    if LAUNCH_PREFIX in environ:
        return environ[LAUNCH_PREFIX]
    words = [] if (found := find_launcher_process()) is None else found[1]
    names = [Path(word).name for word in words]
    start = next((i for i, name in enumerate(names) if name in MPIEXEC), len(names))
    before = words_before_python(words[start:])
    if before and shutil.which(names[start]) == before[0]:
        before[0] = names[start]
    return "".join(f"{shlex.quote(word)} " for word in before)


def words_before_python(words: Sequence[str]) -> list[str]:
    """Return the words before `python` (or `python3.12` and so on), or [] if there is none."""
    for i, word in enumerate(words):
        if "=" not in word and re.fullmatch(r"python[\d.]*", Path(word).name):
            return list(words[:i])
    return []


def find_launcher_process() -> tuple[int, list[str]] | None:
    """Return the process ID and the command line of the launcher that started this process.

    Returns None if /proc is missing or unreadable, or if no ancestor process has a name in
    `MPIEXEC`.
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
