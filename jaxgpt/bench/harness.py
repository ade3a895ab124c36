"""What all benches share: their result, a folder that is gone afterwards, and single processes."""

import contextlib
import importlib.metadata
import os
import platform
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxgpt import __version__
from jaxgpt.cluster.hardware import own_cpus
from jaxgpt.cluster.process_group import ProcessGroup, join_process_group
from jaxgpt.cluster.shutdown import abort_mpi, end_process
from jaxgpt.config import UsageError
from jaxgpt.perf.startup import JOB_START

PROG = "python -m jaxgpt.bench"


@dataclass(frozen=True)
class Result:
    """The measurements of a bench: named values for programs, rows of text for a person."""

    values: dict[str, Any]
    rows: Sequence[tuple[str, str]]
    """(what, finding); a row with an empty name goes on with the one before."""

    def to_dict(self) -> dict[str, Any]:
        """Return the values, with the host and versions that they were measured on."""
        return self.values | environment()

    def table(self) -> str:
        """Return the rows in two columns, and a last one with versions and the processor."""
        on = environment()
        versions = ", ".join(f"{name} {version}" for name, version in on["versions"].items())
        rows = (*self.rows, ("with", f"{versions}; {on['cpus']} CPUs, {on['cpu']}"))
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:{width}}  {finding}" for name, finding in rows)


def environment() -> dict[str, Any]:
    """Return this host, its processor, and versions."""
    packages = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}
    return {
        "host_name": platform.node(),
        "cpu": cpu_model(),
        "cpus": len(own_cpus()),
        "versions": {"jaxgpt": __version__, **packages, "python": platform.python_version()},
    }


def cpu_model() -> str:
    """Return the processor's name where /proc has it, else its architecture."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def log_progress(cluster: ProcessGroup, message: str) -> None:
    """Print a line on process 0's standard error, if that is a terminal."""
    if cluster.is_main and sys.stderr.isatty():
        print(f"... {message}", file=sys.stderr, flush=True)


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    """Return what a function returns, and its seconds."""
    began = time.perf_counter()
    return function(), time.perf_counter() - began


def join_alone(kind: str, timeout: float) -> ProcessGroup:
    """Return the process group of a bench that runs in one process.

    Args:
        timeout: seconds to wait for the other processes of the launch, if there are any.

    Raises:
        UsageError: if there are several processes.
    """
    cluster = join_process_group(timeout)
    if cluster.size > 1:
        raise UsageError(
            f"bench {kind}: {cluster.size} processes; start it without mpiexec, it runs in one"
        )
    return cluster


def child_environment() -> dict[str, str]:
    """Return the variables for a command that counts as started by the user, not by this job."""
    return {name: value for name, value in os.environ.items() if name != JOB_START}


@contextlib.contextmanager
def scratch_folder(cluster: ProcessGroup, parent: Path | None = None) -> Iterator[Path]:
    """Yield an empty folder of the same name on every host; remove it at the end.

    SIGTERM and Ctrl-C remove it too, see `remove_on_signals`.

    Args:
        parent: where it is made; by default where temporary files are.

    Raises:
        UsageError: if nothing can be written there.
    """
    name = cluster.run_on_all(lambda: _make_folder(parent) if cluster.is_main else None)
    folder = Path(cluster.broadcast(name))
    folder.mkdir(exist_ok=True)
    remove_on_signals(folder)
    try:
        yield folder
    finally:
        if cluster.local_rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


def remove_on_signals(folder: Path) -> None:
    """Let SIGTERM and SIGINT remove a folder and end the job.

    Call it again after what installs handlers of its own: JAX's preemption service, `StopSignal`.
    """

    def end(number: int, frame: object) -> None:
        for _ in range(5):  # threads of a save that is under way make the folders that they miss
            shutil.rmtree(folder, ignore_errors=True)
            time.sleep(0.1)
        abort_mpi(128 + number)
        end_process(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)


def _make_folder(parent: Path | None) -> str:
    try:
        if parent is not None:
            parent.mkdir(parents=True, exist_ok=True)
        return tempfile.mkdtemp(prefix="jaxgpt-bench-", dir=parent)
    except OSError as error:
        raise UsageError(
            f"--out={parent}: cannot be written ({error.strerror or error}); give a folder that can"
        ) from None
