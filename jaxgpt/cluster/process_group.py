"""The processes of a job: who they are, and how they agree on something before JAX is up."""

import contextlib
import ctypes
import json
import os
import socket
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from jaxgpt.cluster.environment import (
    Launch,
    SingleRankUsageError,
    find_launch,
    slurm_step,
    started_by_srun,
)
from jaxgpt.cluster.hosts import reachable_name
from jaxgpt.cluster.machines import Machine, find_machine, high_speed_name
from jaxgpt.cluster.shutdown import PeerLost
from jaxgpt.cluster.transport import (
    MpiTransport,
    TcpTransport,
    Transport,
    arrival_limit,
    lost_sentence,
)
from jaxgpt.config import UsageError

T = TypeVar("T")

INIT_TIMEOUT = 300.0  # seconds for all processes to arrive


@dataclass(frozen=True)
class ProcessGroup:
    """Processes of one job, as one of them sees it."""

    launcher: str
    """The launcher, in words."""
    rank: int = 0
    """This process, from 0."""
    size: int = 1
    """Number of processes."""
    local_rank: int = 0
    """This process among those of its host, from 0."""
    local_size: int = 1
    """Number of processes on this host."""
    hosts: tuple[int, ...] = (0,)
    """For each process, the rank of the first process on its host."""
    host_names: tuple[str, ...] = ("localhost",)
    """For each process, the name of its host."""
    machine: Machine | None = None
    """The supercomputer, if it is a known one."""
    mpi_library: str | None = None
    timeout: float = INIT_TIMEOUT
    """Seconds that processes wait for each other when the job starts."""
    notes: tuple[str, ...] = ()
    """Lines for the log about problems that were worked around."""
    transport: Transport | None = None
    """Messages between the processes; None if there is but one."""
    on_close: contextlib.ExitStack = field(default_factory=contextlib.ExitStack, compare=False)
    """Locks and the like, given up when the group is closed."""

    def __enter__(self) -> "ProcessGroup":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Give up locks and the connection; `join_process_group` may be called again.

        MPI itself stays, as it cannot be started twice in a process.
        """
        self.on_close.close()
        if self.transport is not None:
            self.transport.close()

    @property
    def is_main(self) -> bool:
        """True on process 0, the one that prints and writes metrics."""
        return self.rank == 0

    def broadcast(self, value: Any) -> Any:
        """Return process 0's `value` (anything that JSON holds) on every process."""
        if self.transport is None:
            return value
        message = json.dumps(value).encode() if self.is_main else b""
        return json.loads(self.transport.allgather(message)[0])

    def allgather(self, value: Any) -> list[Any]:
        """Return every process's `value` (anything that JSON holds) by rank, on every process."""
        if self.transport is None:
            return [value]
        return [json.loads(m) for m in self.transport.allgather(json.dumps(value).encode())]

    def barrier(self) -> None:
        """Wait until all processes have called it.

        Call it before their first collective: Gloo gives up on a process that is 30 s late.
        """
        self.allgather(None)

    @contextlib.contextmanager
    def name_lost_peers(self) -> Iterator[None]:
        """Turn an exception that comes of another process's end into `PeerLost`.

        A collective of JAX fails without saying who has gone.
        """
        try:
            yield
        except (UsageError, PeerLost):
            raise
        except Exception as error:
            time.sleep(0.5)  # for the connections of a dying process to close
            lost = self.transport.lost_peers() if self.transport else []
            if not lost:
                raise
            raise PeerLost(*([lost_sentence(lost[0])] if self.is_main else [])) from error

    def raise_if_any(self, error: str | None) -> None:
        """Raise on every process the error of the first process that has one.

        Raises:
            UsageError: if any process passed an `error`.
        """
        found = next((e for e in self.allgather(error) if e), None)
        if found:
            raise UsageError(found)

    def run_on_all(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call `function` on every process; return its result here once it has returned on all.

        Raises:
            UsageError: on every process, if `function` raised one on any.
        """
        result, error = catch_usage_error(function, *arguments)
        self.raise_if_any(error)
        return result


def catch_usage_error(function: Callable[..., T], *arguments: Any) -> tuple[T | None, str | None]:
    """Return the function's result, or its `UsageError` as a text for `raise_if_any`."""
    try:
        return function(*arguments), None
    except UsageError as error:
        return None, str(error)


def join_process_group(timeout: float = INIT_TIMEOUT, launch: Launch | None = None) -> ProcessGroup:
    """Find the other processes of this job and wait until all are there, without JAX.

    Args:
        timeout: seconds after which the process ends, naming those that did not come.
        launch: what the launcher said; None asks the environment.

    Raises:
        UsageError: if the launcher's environment or the MPI library does not fit.
        PeerLost: if a process did not come.
    """
    launch = launch or find_launch(os.environ)
    notes: tuple[str, ...] = ()
    if launch.through == "mpi":
        try:
            cluster = _over_mpi(launch, timeout)
        except UsageError as error:
            if not started_by_srun(os.environ):
                raise
            # srun tells all that is needed, whatever MPI mpi4py was built with.
            launch = slurm_step(os.environ)
            notes = (f"going on without MPI, by Slurm's variables: {error}",)
    if launch.through == "tcp":
        cluster = _over_tcp(launch, timeout)
    elif launch.through is None:
        name = launch.launcher + (f" ({launch.variable})" if launch.variable else "")
        cluster = ProcessGroup(launcher=name, host_names=(socket.gethostname(),))
    machine = find_machine(socket.gethostname(), os.environ)
    return replace(cluster, machine=machine, timeout=timeout, notes=notes)


def coordinator_host(cluster: ProcessGroup) -> str:
    """Return the name by which all reach process 0: loopback where they share its host."""
    if cluster.local_size == cluster.size:
        return "127.0.0.1"
    if cluster.machine:
        return high_speed_name(cluster.machine, socket.gethostname())
    return reachable_name()


def _over_mpi(launch: Launch, timeout: float) -> ProcessGroup:
    """Join the job that MPI describes.

    Raises:
        UsageError: if MPI cannot be loaded, or sees the processes as separate jobs.
    """
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise SingleRankUsageError(
            f"{launch.variable}: an MPI launcher started this process but mpi4py cannot load an "
            f"MPI library ({error}); pip install 'jaxgpt[mpi]' brings MPICH"
        ) from None
    library = MPI.Get_library_version().split("\n")[0].replace("\x00", "").strip()
    # MPICH would abort in such a job; Open MPI makes each process a job of its own.
    if launch.launcher == "Open MPI" and library.startswith(("MPICH", "Intel")):
        raise _another_mpi(launch, library)
    if not MPI.Is_initialized():
        with arrival_limit(launch, timeout):
            # mpi4py's own call would keep Python's lock, and no thread could watch the time.
            ctypes.CDLL(MPI.__file__).MPI_Init(None, None)
        import atexit

        atexit.register(lambda: MPI.Is_finalized() or MPI.Finalize())
    MPI.COMM_WORLD.Set_errhandler(MPI.ERRORS_RETURN)
    comm = MPI.COMM_WORLD.Dup()
    if comm.size == 1 and (launch.rank > 0 or (launch.size or 1) > 1):
        raise _another_mpi(launch, library)
    host = comm.Split_type(MPI.COMM_TYPE_SHARED)
    first = array("i", [comm.rank])
    host.Bcast(first, root=0)
    local_rank, local_size = host.rank, host.size
    host.Free()
    cluster = ProcessGroup(
        launcher=f"{launch.launcher} ({launch.variable}; {library})",
        rank=comm.rank,
        size=comm.size,
        local_rank=local_rank,
        local_size=local_size,
        mpi_library=library,
        transport=MpiTransport(comm),
    )
    found = cluster.allgather([first[0], socket.gethostname()])
    return replace(
        cluster, hosts=tuple(f for f, _ in found), host_names=tuple(name for _, name in found)
    )


def _another_mpi(launch: Launch, library: str) -> UsageError:
    """Return the error for a process whose mpi4py uses another MPI than its launcher."""
    started = f"{launch.size} processes" if launch.size else "several processes"
    # Where the launcher does not say how many there are, process 0 sees nothing wrong.
    return (UsageError if launch.size else SingleRankUsageError)(
        f"{launch.variable}: the launcher ({launch.launcher}) started {started}, but mpi4py uses "
        f"{library}, in which each is a job of its own; start them with that MPI's mpiexec, or "
        "install mpi4py for the launcher's MPI (pip install --no-binary mpi4py mpi4py)"
    )


def _over_tcp(launch: Launch, timeout: float) -> ProcessGroup:
    """Join the job that the environment describes; the processes meet at `launch.address`."""
    cluster = ProcessGroup(
        launcher=f"{launch.launcher} ({launch.variable})",
        rank=launch.rank,
        size=launch.size,
        transport=TcpTransport(launch, timeout),
    )
    here = [socket.gethostname(), _boot_id()]
    found = cluster.allgather([*here, launch.local_rank])
    everyone = [host for *host, _ in found]
    mates = [rank for rank, host in enumerate(everyone) if host == here]
    told = [found[rank][-1] for rank in mates]
    position = mates.index(launch.rank)
    if set(told) == set(range(len(mates))):  # two torchruns on a host count from 0 each
        position = launch.local_rank
    return replace(
        cluster,
        local_rank=position,
        local_size=len(mates),
        hosts=tuple(everyone.index(host) for host in everyone),
        host_names=tuple(name for name, _ in everyone),
    )


def _boot_id() -> str:
    """Return what tells apart hosts of the same name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
