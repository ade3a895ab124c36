"""Checks of the run directory: can all hosts write to one and the same, and what does it lie on?"""

import contextlib
import os
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from jaxgpt.cluster.hardware import lock_file
from jaxgpt.cluster.process_group import ProcessGroup
from jaxgpt.config import UsageError
from jaxgpt.doctor.checks import Check, fail, ok, warn
from jaxgpt.perf.units import GIB, format_bytes

LITTLE_SPACE = GIB
PATIENCE = 10  # seconds for a network file system to show one host what another wrote
IN_MEMORY = ("tmpfs", "ramfs")


@dataclass(frozen=True)
class HostView:
    """The run directory as the first process of a host sees it."""

    host_name: str
    error: str | None
    """Why it cannot write there."""
    sees_file: bool
    """Whether a file that process 0 wrote is there."""
    file_system: str
    free: int
    """Bytes."""
    locks: Literal["work", "let in", "not supported"]
    """Locks work if process 0 can lock that file, and this process is then kept out."""


def check_writable(directory: Path) -> None:
    """Check that a run can write to `directory`, and leave nothing behind.

    Raises:
        UsageError: if it cannot.
    """
    try:
        with _scratch_file(directory):
            pass
    except OSError as error:
        raise UsageError(
            f"out={directory}: cannot be written ({error.strerror or error}); give --out a folder "
            "that can"
        ) from None


def directory_checks(cluster: ProcessGroup, directory: Path) -> list[Check]:
    """Let process 0 write and lock a file, and one process of every other host look for it."""
    with contextlib.ExitStack() as stack:
        name = error = locked = None
        if cluster.is_main:
            try:
                name, locked = stack.enter_context(_scratch_file(directory))
            except OSError as e:
                error = e.strerror or str(e)
        name, error, locked = cluster.broadcast([name, error, locked])
        view = None
        if name is not None and cluster.hosts[cluster.rank] == cluster.rank:
            view = asdict(_probe(Path(name), locked, cluster))
        views = [HostView(**v) for v in cluster.allgather(view) if v]
    if error:
        finding = f"{directory} cannot be written on {cluster.host_names[0]} ({error})"
        remedy = "start from a folder that can be written, or give --out one"
        return [fail("run directory", finding, remedy)]
    return evaluate(directory, views)


def evaluate(directory: Path, views: Sequence[HostView]) -> list[Check]:
    """Return the lines of the report, from the view of every host."""
    return [_check_shared(directory, views), _check_file_system(views[0]), _check_locks(views)]


def _check_shared(directory: Path, views: Sequence[HostView]) -> Check:
    for view in views:
        if not view.sees_file:
            return fail(
                "run directory",
                f"{view.host_name} does not see in {directory} what {views[0].host_name} wrote",
                "give --out a folder on a file system that all hosts share: all of them write "
                "parts of a checkpoint",
            )
        if view.error:
            return fail(
                "run directory",
                f"{directory} cannot be written on {view.host_name} ({view.error})",
                "look at how the file system is mounted there, and at your quota",
            )
    seen = "" if len(views) == 1 else f", the same on all {len(views)} hosts"
    return ok("run directory", f"{directory} can be written{seen}")


def _check_file_system(view: HostView) -> Check:
    finding = f"{view.file_system}, {format_bytes(view.free)} free"
    if view.free < LITTLE_SPACE:
        return warn("file system", finding, "make room, or give --out a folder on another one")
    if view.file_system in IN_MEMORY:
        return warn(
            "file system",
            f"{finding}, in the host's memory: gone when the host restarts or the job ends",
            "give --out a folder on a disk or a parallel file system",
        )
    return ok("file system", finding)


def _check_locks(views: Sequence[HostView]) -> Check:
    """Check the locks that keep a second job out of a run directory."""
    remedy = (
        "give every job an --out of its own; a mount with locks (Lustre: -o flock) protects a run "
        "from a second job"
    )
    for view in views:
        if view.locks == "let in":
            finding = f"a file that {views[0].host_name} locked is not locked on {view.host_name}"
            return warn("file locks", finding, remedy)
        if view.locks == "not supported":
            return warn("file locks", f"{view.host_name} cannot lock files there", remedy)
    return ok("file locks", "a second job is kept out of a run directory in use")


@contextlib.contextmanager
def _scratch_file(directory: Path) -> Iterator[tuple[str, bool]]:
    """Yield a file in `directory`, and whether it could be locked.

    Remove it afterwards, with the folders that were made for it.
    """
    directory = directory.absolute()
    made = [d for d in (directory, *directory.parents) if not d.exists()]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f".jaxgpt-doctor-{uuid.uuid4().hex}"
        with path.open("x") as file:
            try:
                yield str(path), lock_file(file) == "locked"
            finally:
                path.unlink()
    finally:
        for folder in made:
            with contextlib.suppress(OSError):
                folder.rmdir()


def _probe(path: Path, locked: bool, cluster: ProcessGroup) -> HostView:
    """Look for the file that process 0 wrote, and try to write and to lock beside it."""
    deadline = time.monotonic() + PATIENCE
    # os.path.exists, which says no where this host may not look; Path.exists raises.
    while not os.path.exists(path) and time.monotonic() < deadline:
        time.sleep(0.1)
    error, locks = None, "work" if locked else "not supported"
    own = path.with_name(f"{path.name}-{cluster.rank}")
    try:
        own.touch()
        own.unlink()
        if locked and not cluster.is_main and os.path.exists(path):
            with path.open("a") as file:
                locks = {"locked": "let in", "taken": "work"}.get(lock_file(file), "not supported")
    except OSError as e:
        error = e.strerror or str(e)
    place = path.parent if os.access(path.parent, os.X_OK) else Path("/")
    found = os.statvfs(place)
    return HostView(
        host_name=cluster.host_names[cluster.rank],
        error=error,
        sees_file=os.path.exists(path),
        file_system=file_system_of(place),
        free=found.f_bavail * found.f_frsize,
        locks=locks,
    )


def file_system_of(path: Path, mounts: str | None = None) -> str:
    """Return the type of file system that a folder lies on, such as `lustre`, or `unknown`.

    Args:
        mounts: the text of /proc/mounts, which is read by default.
    """
    if mounts is None:
        table = Path("/proc/mounts")
        mounts = table.read_text() if table.exists() else ""
    best, kind = -1, "unknown"
    for line in mounts.splitlines():
        point = Path(line.split()[1].replace("\\040", " "))
        # Of several mounts on one point the last one counts.
        if path.resolve().is_relative_to(point) and len(point.parts) >= best:
            best, kind = len(point.parts), line.split()[2]
    return kind
