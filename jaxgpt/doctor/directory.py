"""The run directory: whether all hosts can write to one and the same, and what it lies on."""

import contextlib
import os
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TextIO

from jaxgpt.cluster.hardware import lock_file
from jaxgpt.cluster.process_group import ProcessGroup
from jaxgpt.config import UsageError
from jaxgpt.doctor.checks import GIB, Check

LITTLE_SPACE = GIB
PATIENCE = 10  # seconds for a network file system to show one host what another wrote
IN_MEMORY = ("tmpfs", "ramfs")


@dataclass(frozen=True)
class Sight:
    """What the first process of a host sees of the run directory."""

    host_name: str
    error: str | None
    """Why it cannot write there."""
    sees_file: bool
    """Whether a file that process 0 wrote is there."""
    file_system: str
    free: int
    """Bytes."""
    locks: Literal["work", "let in", "not supported"]
    """Whether process 0 can lock that file, and this process cannot then."""


def check_writable(directory: Path) -> None:
    """Makes sure that a run could write to `directory`, and leaves nothing behind.

    Raises:
        UsageError: if it could not.
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
    """Process 0 writes a file and locks it; one process of every other host looks for it."""
    with contextlib.ExitStack() as stack:
        name = error = locked = None
        if cluster.is_main:
            try:
                name, locked = stack.enter_context(_scratch_file(directory))
            except OSError as e:
                error = e.strerror or str(e)
        name, error, locked = cluster.broadcast([name, error, locked])
        sight = None
        if name is not None and cluster.hosts[cluster.rank] == cluster.rank:
            sight = asdict(_look(Path(name), locked, cluster))
        sights = [Sight(**s) for s in cluster.allgather(sight) if s]
    if error:
        return [
            Check(
                "run directory",
                "FAIL",
                f"{directory} cannot be written on {cluster.host_names[0]} ({error})",
                "start from a folder that can be written, or give --out one",
            )
        ]
    return judge(directory, sights)


def judge(directory: Path, sights: Sequence[Sight]) -> list[Check]:
    """The lines of the report, by what the first process of every host sees."""
    return [_shared(directory, sights), _file_system(sights[0]), _locks(sights)]


def _shared(directory: Path, sights: Sequence[Sight]) -> Check:
    for sight in sights:
        if not sight.sees_file:
            return Check(
                "run directory",
                "FAIL",
                f"{sight.host_name} does not see in {directory} what {sights[0].host_name} wrote",
                "give --out a folder on a file system that all hosts share: all of them write "
                "parts of a checkpoint",
            )
        if sight.error:
            return Check(
                "run directory",
                "FAIL",
                f"{directory} cannot be written on {sight.host_name} ({sight.error})",
                "look at how the file system is mounted there, and at your quota",
            )
    seen = "" if len(sights) == 1 else f", the same on all {len(sights)} hosts"
    return Check("run directory", "OK", f"{directory} can be written{seen}")


def _file_system(sight: Sight) -> Check:
    finding = f"{sight.file_system}, {sight.free / GIB:,.1f} GiB free"
    if sight.free < LITTLE_SPACE:
        return Check(
            "file system", "WARN", finding, "make room, or give --out a folder on another one"
        )
    if sight.file_system in IN_MEMORY:
        return Check(
            "file system",
            "WARN",
            f"{finding}, in the host's memory: gone when the host restarts or the job ends",
            "give --out a folder on a disk or a parallel file system",
        )
    return Check("file system", "OK", finding)


def _locks(sights: Sequence[Sight]) -> Check:
    """Without locks two jobs can write into one run directory."""
    remedy = (
        "give every job an --out of its own; a mount with locks (Lustre: -o flock) protects a run "
        "from a second job"
    )
    for sight in sights:
        if sight.locks == "let in":
            finding = f"a file that {sights[0].host_name} locked is not locked on {sight.host_name}"
            return Check("file locks", "WARN", finding, remedy)
        if sight.locks == "not supported":
            finding = f"{sight.host_name} cannot lock files there"
            return Check("file locks", "WARN", finding, remedy)
    return Check("file locks", "OK", "a second job is kept out of a run directory in use")


@contextlib.contextmanager
def _scratch_file(directory: Path) -> Iterator[tuple[str, bool]]:
    """A file in `directory`, and whether it could be locked.

    Afterwards it is gone, and so are folders that were made for it.
    """
    directory = directory.absolute()
    made = [d for d in (directory, *directory.parents) if not d.exists()]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f".jaxgpt-doctor-{uuid.uuid4().hex}"
        with path.open("x") as file:
            try:
                yield str(path), _lock(file) == "locked"
            finally:
                path.unlink()
    finally:
        for folder in made:
            with contextlib.suppress(OSError):
                folder.rmdir()


def _look(path: Path, locked: bool, cluster: ProcessGroup) -> Sight:
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
                locks = {"locked": "let in", "kept out": "work"}.get(_lock(file), "not supported")
    except OSError as e:
        error = e.strerror or str(e)
    place = path.parent if os.access(path.parent, os.X_OK) else Path("/")
    found = os.statvfs(place)
    return Sight(
        host_name=cluster.host_names[cluster.rank],
        error=error,
        sees_file=os.path.exists(path),
        file_system=file_system_of(place),
        free=found.f_bavail * found.f_frsize,
        locks=locks,
    )


def _lock(file: TextIO) -> str:
    """Locks a file: `locked`, `kept out` by another process, or `not supported`."""
    words = {"locked": "locked", "taken": "kept out", "unsupported": "not supported"}
    return words[lock_file(file)]


def file_system_of(path: Path, mounts: str | None = None) -> str:
    """The type of the file system that a folder lies on, such as `lustre`; `unknown` if not told.

    Args:
        mounts: as /proc/mounts has it, which is read by default.
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
