"""Checks of the run directory: its file system, and write access from every host."""

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from jaxgpt.cluster.process_group import ProcessGroup, catch_usage_error
from jaxgpt.cluster.timeouts import ANSWER
from jaxgpt.config import UsageError
from jaxgpt.doctor.checks import Check
from jaxgpt.perf.units import GIB, format_bytes

MIN_FREE_BYTES = GIB
IN_MEMORY = ("tmpfs", "ramfs")


def directory_checks(cluster: ProcessGroup, directory: Path) -> list[Check]:
    """Check that all hosts can write to the run directory and see a file that process 0 wrote.

    If the directory does not exist, its nearest existing parent is checked. One process per host
    runs the checks. For each check in `host_checks`, returns the worst result across all hosts. If
    process 0 cannot write, returns a single FAIL. Every process must call this. Raises `OSError`,
    as `host_checks` does.
    """
    path = error = None
    mine: list[Check] = []
    with contextlib.ExitStack() as stack:
        if cluster.is_main:
            path, error = catch_usage_error(stack.enter_context, scratch_file(directory))
        path, error = cluster.broadcast([path, error])
        if path and cluster.hosts[cluster.rank] == cluster.rank:
            mine = host_checks(path, cluster)
        everyone = cluster.allgather([asdict(check) for check in mine])
    if error:
        finding, _, remedy = error.partition("; ")
        return [Check("run directory", "FAIL", finding, remedy)]
    worst: dict[str, Check] = {}
    for check in (Check(**c) for checks in everyone for c in checks):
        if check.name not in worst or worst[check.name].status == "OK":
            worst[check.name] = check
    return list(worst.values())


def check_writable(directory: Path, option: str = "--out") -> None:
    """Raise `UsageError` if no file can be created in `directory`.

    If `directory` does not exist, its nearest existing parent is tested. The error message names
    `option`.
    """
    with scratch_file(directory, option):
        pass


@contextlib.contextmanager
def scratch_file(directory: Path, option: str = "--out") -> Iterator[str]:
    """Yield the absolute path of a new file, and remove the file at the end of the block.

    The file is in `directory` or, if that does not exist, in its nearest existing parent. Raises a
    `UsageError` that names `option` if the file cannot be created.
    """
    parents = (directory, *directory.absolute().parents)
    # In an inaccessible folder, os.path.exists returns False, but Path.exists raises an error.
    place = next(folder for folder in parents if os.path.exists(folder))
    try:
        file = tempfile.NamedTemporaryFile(prefix=".jaxgpt-doctor-", dir=place)
    except OSError as error:
        raise UsageError(
            f"{option}={directory}: cannot be written to ({error.strerror or error}); give "
            f"{option} a writable folder"
        ) from None
    with file:
        yield os.path.abspath(file.name)


def host_checks(path: str, cluster: ProcessGroup) -> list[Check]:
    """Check that this host sees process 0's file at `path` and can write to the same folder.

    Waits up to `ANSWER` seconds for the file. Returns a single FAIL, or two checks: the run
    directory and its file system. Raises `OSError`, as `check_file_system` does.
    """
    directory, host = Path(path).parent, cluster.host_names[cluster.rank]
    deadline = time.monotonic() + ANSWER
    while not os.path.exists(path):
        if time.monotonic() > deadline:
            finding = (
                f"{host} does not see the file that {cluster.host_names[0]} wrote to {directory}"
            )
            remedy = "give --out a folder on a file system that all hosts share"
            return [Check("run directory", "FAIL", finding, remedy)]
        time.sleep(0.1)
    try:
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        finding = f"{directory} cannot be written to on {host} ({error.strerror or error})"
        remedy = "check how the file system is mounted on that host, and check your quota"
        return [Check("run directory", "FAIL", finding, remedy)]
    n_hosts = len(set(cluster.hosts))
    seen = f", the same on all {n_hosts} hosts" if n_hosts > 1 else ""
    shared = Check("run directory", "OK", f"{directory} is writable{seen}")
    return [shared, check_file_system(directory)]


def check_file_system(directory: Path) -> Check:
    """Check that the file system is not in memory, and that `MIN_FREE_BYTES` bytes are free.

    Only the types in `IN_MEMORY` count as in-memory file systems. Raises `OSError` if the mounts or
    the free space cannot be read.
    """
    kind, free = file_system_of(directory), shutil.disk_usage(directory).free
    finding = f"{kind}, {format_bytes(free)} free"
    remedy = "free space, or give --out another file system" if free < MIN_FREE_BYTES else ""
    if kind in IN_MEMORY:
        finding += ", held in the host's memory, and lost when the host restarts or the job ends"
        remedy = "give --out a folder on a disk or a parallel file system"
    return Check("file system", "WARN" if remedy else "OK", finding, remedy)


def file_system_of(path: Path) -> str:
    """Return the type of the file system that contains `path`, such as `lustre`.

    If the type cannot be determined, returns `unknown`. Raises `OSError` if /proc/mounts exists but
    cannot be read.
    """
    table = Path("/proc/mounts")
    text = table.read_text(errors="surrogateescape") if table.exists() else ""
    mounts = [line.split() for line in text.splitlines()]
    # If several file systems have the same mount point, the last one hides the others.
    kinds = {point.replace("\\040", " "): kind for _, point, kind, *_ in mounts}
    path = Path(os.path.realpath(path))  # accepts symlink loops
    return next((kinds[str(p)] for p in (path, *path.parents) if str(p) in kinds), "unknown")
