"""Folders that are gone when a measurement ends, also when it is interrupted or killed."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from jaxgpt.cluster.process_group import ProcessGroup
from jaxgpt.cluster.shutdown import abort_mpi, end_process
from jaxgpt.config import UsageError

PATIENCE = 5  # seconds for what is still being written
TRY_AGAIN = 1  # seconds after which a signal that has not ended the process comes again
REMOVE_AFTER = """
import os, shutil, sys, time
folder, *processes = sys.argv[1:]
def is_there(process):
    try:
        os.kill(int(process), 0)
    except OSError:
        return False
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"  # nobody waits for it
    except FileNotFoundError:
        return not os.path.exists("/proc/self")  # a system without such files
for process in processes:
    while is_there(process):
        time.sleep(0.1)
end, gone = time.monotonic() + 30, 0
while gone < 5 and time.monotonic() < end:  # threads of one that was killed may still write
    gone = 0 if os.path.exists(folder) else gone + 1
    shutil.rmtree(folder, ignore_errors=True)
    time.sleep(0.1)
"""

_ending = threading.Event()  # by a signal


def end_on_signals() -> None:
    """Has SIGTERM and SIGINT end this process by an exception, so that it clears up.

    The trainer's `StopSignal` has other handlers, which wait for the end of a step.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _interrupt)


@contextlib.contextmanager
def scratch_folder(cluster: ProcessGroup, parent: Path | None = None) -> Iterator[Path]:
    """An empty folder of the same name on every host.

    Args:
        parent: where it is made; by default where temporary files are.

    Raises:
        UsageError: if nothing can be written there.
    """
    end_on_signals()
    name = (
        cluster.run_on_all(_make, parent) if cluster.is_main else cluster.run_on_all(lambda: None)
    )
    folder = Path(cluster.broadcast(name))
    folder.mkdir(exist_ok=True)
    _remove_after_all(cluster, folder)
    status = None
    try:
        yield folder
    except KeyboardInterrupt:
        _ending.set()
        status = 128 + signal.SIGINT
    except SystemExit as stop:
        _ending.set()
        status = stop.code
    finally:
        # All of them where it is interrupted: a launcher kills the others when the first one ends.
        if cluster.local_rank == 0 or status is not None:
            _remove(folder)
    if status is not None:
        abort_mpi(status)
        end_process(status)  # what an interrupted save waits for, up to five minutes, will not come


def _make(parent: Path | None) -> str:
    try:
        if parent is not None:
            parent.mkdir(parents=True, exist_ok=True)
        return tempfile.mkdtemp(prefix="jaxgpt-bench-", dir=parent)
    except OSError as error:
        raise UsageError(
            f"--out={parent}: cannot be written ({error.strerror or error}); give a folder that can"
        ) from None


def _remove_after_all(cluster: ProcessGroup, folder: Path) -> None:
    """Has `folder` removed once all processes of this host are gone, by one that outlives them.

    One that is killed cannot do it, and those that are not yet ended may still be writing:
    TensorStore makes the folders that it misses.
    """
    processes = zip(cluster.allgather(os.getpid()), cluster.hosts, strict=True)
    here = [str(process) for process, host in processes if host == cluster.hosts[cluster.rank]]
    if cluster.local_rank == 0:
        subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", REMOVE_AFTER, str(folder.absolute()), *here],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )


def _interrupt(number: int, frame: object) -> None:
    """Ends this process by an exception, and by another where that one is lost.

    Python ignores those that come up in a finalizer, and libraries have many.
    """
    again = threading.Timer(TRY_AGAIN, _interrupt_again, [number])
    again.daemon = True
    again.start()
    raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)


def _interrupt_again(number: int) -> None:
    if not _ending.is_set():
        os.kill(os.getpid(), number)


def _remove(folder: Path) -> None:
    """Threads that an interrupted save has left may still be writing."""
    deadline = time.monotonic() + PATIENCE
    while folder.exists() and time.monotonic() < deadline:
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.1)
