"""Pool of MPI processes that tokenize files."""

import contextlib
import os
import signal
from collections.abc import Iterator
from concurrent.futures import Executor
from typing import NamedTuple

from jaxgpt.cluster.environment import find_launch
from jaxgpt.cluster.hardware import own_cpus
from jaxgpt.cluster.process_group import start_mpi
from jaxgpt.cluster.shutdown import end_with
from jaxgpt.config import UsageError


class Workers(NamedTuple):
    """The role of a process in the job."""

    is_main: bool
    pool: Executor | None  # the other processes; None in a worker or a single-process job


@contextlib.contextmanager
def job_workers(threads: int | None) -> Iterator[Workers]:
    """Connect the job's processes, so that process 0 can use the others as a pool.

    The other processes enter the block after process 0 has left it. If there are several processes,
    SIGINT and SIGTERM are reset to their default actions, and an exception in the block terminates
    the job at once. All processes must call this.

    Each process sets RAYON_NUM_THREADS, the number of threads that a `FileTokenizer` uses, to
    `threads`. By default, the CPUs of a host are divided evenly among its processes. Raises
    `UsageError` if several processes were started without MPI.
    """
    launch = find_launch(os.environ)
    if launch.through == "tcp":
        raise UsageError(
            f"{launch.variable}: several processes need MPI to prepare data together; start "
            "jaxgpt.prepare with mpiexec, or start one process"
        )
    world = None
    if launch.through == "mpi":
        start_mpi(launch, for_threads=True)
        from mpi4py import MPI

        world = MPI.COMM_WORLD
    if world is None or world.size == 1:
        _use_threads(threads or len(own_cpus()))
        yield Workers(True, None)
        return
    from mpi4py.futures import MPICommExecutor

    # The pool cannot shut down in the middle of a file, so signals must not wait for it.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    host = world.Split_type(MPI.COMM_TYPE_SHARED)
    cpus = set().union(*host.allgather(own_cpus()))  # processes on a host may share CPUs
    _use_threads(threads or max(1, len(cpus) // host.size))
    with MPICommExecutor(world, root=0) as pool:
        try:
            yield Workers(world.rank == 0, pool)
        except BaseException as error:
            end_with(error)


def _use_threads(number: int) -> None:
    os.environ["RAYON_NUM_THREADS"] = str(number)
