"""The processes of a job: their ranks and hosts, and collectives that work before JAX starts."""

import atexit
import contextlib
import ctypes
import json
import operator
import os
import platform
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from jaxgpt.cluster.environment import (
    COORDINATOR,
    Launch,
    SingleRankUsageError,
    find_launch,
    slurm_step,
    started_by_srun,
)
from jaxgpt.cluster.hardware import raise_open_file_limit
from jaxgpt.cluster.hosts import reachable_name
from jaxgpt.cluster.machines import Machine, find_machine, high_speed_name
from jaxgpt.cluster.monitor import HangLimit, Monitor
from jaxgpt.cluster.shutdown import PeerLost, report_of
from jaxgpt.cluster.timeouts import ANSWER, SETTLE
from jaxgpt.config import Config, UsageError

T = TypeVar("T")

INIT_TIMEOUT: float = Config.init_timeout  # seconds; for commands that do not have this setting


@dataclass(frozen=True)
class ProcessGroup:
    """The processes of a job, as seen by one of them.

    The job lasts as long as the group's `with` block. In a job with several processes, an exception
    that propagates out of the block is reported (except Ctrl-C), and all processes are terminated.
    """

    launcher: str
    rank: int = 0
    size: int = 1
    local_rank: int = 0  # index of this process on its host, from 0
    local_size: int = 1  # number of processes on this host
    hosts: tuple[int, ...] = (0,)  # by rank: the first rank on the same host
    host_names: tuple[str, ...] = ("localhost",)  # by rank
    machine: Machine | None = None  # from `find_machine`
    mpi_library: str | None = None
    timeout: float = INIT_TIMEOUT  # seconds to wait for other processes at startup
    notes: tuple[str, ...] = ()  # log lines about problems that jaxgpt worked around
    monitor: Monitor = field(default_factory=Monitor, compare=False)
    # Connections, locks and other resources, released at the end of the group's `with` block.
    on_close: contextlib.ExitStack = field(default_factory=contextlib.ExitStack, compare=False)

    def __enter__(self) -> "ProcessGroup":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        # Even for SystemExit, because the other processes are still running.
        if error is not None and self.size > 1:
            self.monitor.end_job(*report_of(error))
        self.on_close.close()
        self.monitor.close()  # leave MPI running; it can be initialized only once

    @property
    def is_main(self) -> bool:
        """True on process 0, which prints output and writes metrics."""
        return self.rank == 0

    def broadcast(self, value: Any) -> Any:
        """Return process 0's `value` (see `allgather`) on all processes.

        All processes must call this.
        """
        return self.combine(value if self.is_main else None, operator.itemgetter(0))

    def allgather(self, value: Any) -> list[Any]:
        """Return the `value` (any JSON value) of each process, in rank order.

        If there are several processes, the values are converted to JSON and back, so tuples become
        lists. All processes must call this.
        """
        return self.combine(value, list)

    def combine(self, value: Any, function: Callable[[list[Any]], Any]) -> Any:
        """Return `function(values)`, where `values` is the list that `allgather` returns.

        This sends only the result to every process, so it scales better than `allgather`. Only
        process 0 calls `function`, which must not raise errors. All processes must call this.
        """
        return self.monitor.combine(value, function)

    def barrier(self) -> None:
        """Wait until all processes have called this.

        Call this before JAX's first collective, because Gloo waits only 30 s.
        """
        self.combine(None, lambda values: None)

    def raise_if_any(self, error: str | None) -> None:
        """If any process has an error, raise `UsageError` on all processes.

        `error` is this process's message; None or an empty string means no error. If several
        processes have errors, the message from the lowest rank is used. All processes must call
        this.
        """
        first = self.combine(error, lambda errors: next(filter(None, errors), None))
        if first:
            raise UsageError(*first.splitlines())

    def run_on_all(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call `function` on every process, and return this process's result.

        If any call raises a `UsageError` or a subclass, all processes raise a plain `UsageError`
        with the message from the lowest rank that failed. Other exceptions propagate only on the
        process that raised them. All processes must call this.
        """
        result, error = catch_usage_error(function, *arguments)
        self.raise_if_any(error)
        return result

    def run_on_main(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call `function` on process 0, and return its result (see `allgather`) on all processes.

        All processes raise any `UsageError` that the call raises. All processes must call this.
        """
        own = catch_usage_error(function, *arguments) if self.is_main else (None, None)
        result, error = self.combine(own, operator.itemgetter(0))
        if error:
            raise UsageError(*error.splitlines())
        return result


def catch_usage_error(function: Callable[..., T], *arguments: Any) -> tuple[T | None, str | None]:
    """Return (result, None), or (None, message) if `function` raises a `UsageError`.

    Other exceptions propagate.
    """
    try:
        return function(*arguments), None
    except UsageError as error:
        return None, str(error)


def own_host(group: ProcessGroup) -> str:
    """Return a name or address that all processes can use to reach this host.

    Call this only on process 0. Returns 127.0.0.1 if all processes run on this host. In a job on
    several hosts, the host in JAXGPT_COORDINATOR (host:port) overrides the detected name.
    """
    return "127.0.0.1" if group.local_size == group.size else _outside_name(group.machine)


def _outside_name(machine: Machine | None) -> str:
    if given := os.environ.get(COORDINATOR):
        return given.rpartition(":")[0].strip("[]")
    return high_speed_name(machine, platform.node()) if machine else reachable_name()


def join_process_group(
    timeout: float = INIT_TIMEOUT, limit: HangLimit | None = None, launch: Launch | None = None
) -> ProcessGroup:
    """Wait until all processes of the job have started, and connect them, without using JAX.

    If some processes do not start in time, the job ends with status 1 and an error that lists them
    if possible. It also ends with status 1 if processes report conflicting ranks or numbers of
    processes. In a job with several processes, this starts the monitor's thread and, if necessary,
    raises the limit on open files. Under an MPI launcher, this initializes MPI, and starts the
    thread even for a single process.

    Args:
        timeout: seconds to wait for the other processes.
        limit: how long a process may be silent or make no progress before the job ends with status
            70. None means no limit. In a single-process job without MPI, the limit takes effect
            when `monitor.start` is called.
        launch: rank and size of this process. By default, they are read from the environment.

    Raises:
        UsageError: if the MPI library does not work and srun did not start this process.
        PeerLost: if process 0 cannot be reached in time or cannot listen on its port.
    """
    launch = launch or find_launch(os.environ)
    monitor, machine = Monitor(limit), find_machine(socket.gethostname(), os.environ)
    notes: tuple[str, ...] = ()
    library = connection = None
    if launch.through == "mpi":
        try:
            with monitor.arrival_limit(launch, timeout):
                library = start_mpi(launch)
            launch, connection = _connect_over_mpi(launch, machine)
        except UsageError as error:
            if not started_by_srun(os.environ):
                raise
            # Slurm's variables are sufficient.
            launch = slurm_step(os.environ)
            notes = (f"continuing without MPI, using Slurm's variables: {error}",)
    rank, size = launch.rank, launch.size or 1
    if launch.through == "tcp":
        at = launch.address
        connection = connect_to_rank0(at, rank, timeout) if rank else listen(at)
    if connection is not None:
        raise_open_file_limit(size + 100)  # process 0 has a connection to each process
        monitor.connect(rank, size, connection, timeout)
    places = [tuple(place) for place in monitor.combine(_host_identity(), list)]
    first = {place: rank for rank, place in reversed(list(enumerate(places)))}
    hosts = tuple(first[place] for place in places)
    monitor.host_names = tuple(name for name, _ in places)
    told = "; ".join(words for words in (launch.variable, library) if words)
    return ProcessGroup(
        launcher=f"{launch.launcher} ({told})" if told else launch.launcher,
        rank=rank,
        size=size,
        local_rank=hosts[:rank].count(hosts[rank]),
        local_size=hosts.count(hosts[rank]),
        hosts=hosts,
        host_names=monitor.host_names,
        machine=machine,
        mpi_library=library,
        timeout=timeout,
        notes=notes,
        monitor=monitor,
    )


def join_alone(what: str, otherwise: str = "") -> ProcessGroup:
    """Return the process group of a single-process job.

    Raises `UsageError` if a launcher started several processes. The message starts with `what` and
    ends with `otherwise`.
    """
    cluster = join_process_group()
    if cluster.size > 1:
        raise UsageError(
            f"{what}: runs in one process, which uses all devices of its host; run it without a "
            f"launcher{otherwise}"
        )
    return cluster


def _host_identity() -> list[str]:
    """Return [host name, boot ID or ""] for this host.

    The boot ID distinguishes hosts with the same name.
    """
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    return [socket.gethostname(), boot_id.read_text() if boot_id.exists() else ""]


def start_mpi(launch: Launch, for_threads: bool = False) -> str:
    """Initialize MPI unless it is already initialized. Return the MPI library's name and version.

    The initialization waits for all processes. If `for_threads` is set, it requests support for
    calls from several threads. MPI is finalized when the process exits if this initialized it.

    Raises `UsageError` if MPI cannot be loaded or treats each process as a separate job. The error
    is a `SingleRankUsageError` if the other processes may not notice the problem.
    """
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise SingleRankUsageError(
            f"{launch.variable}: an MPI launcher started this process, but mpi4py cannot load "
            f"an MPI library ({error}); to install MPICH, run: pip install 'jaxgpt[mpi]'"
        ) from None
    library = MPI.Get_library_version().split("\n")[0].replace("\x00", "").strip()
    # MPICH treats each process that Open MPI's launcher starts as a separate job, and would abort.
    fits = launch.launcher != "Open MPI" or not library.startswith(("MPICH", "Intel"))
    if fits:
        if not MPI.Is_initialized():
            if for_threads:
                MPI.Init_thread(MPI.THREAD_MULTIPLE)
            else:  # mpi4py's call would hold the GIL and block the monitor's thread
                ctypes.CDLL(MPI.__file__).MPI_Init(None, None)
            atexit.register(lambda: MPI.Is_finalized() or MPI.Finalize())
        fits = MPI.COMM_WORLD.size > 1 or (launch.rank == 0 and (launch.size or 1) == 1)
    if not fits:
        # If the launcher does not set the number of processes, process 0 cannot detect this.
        raise (UsageError if launch.size else SingleRankUsageError)(
            f"{launch.variable}: the launcher ({launch.launcher}) started "
            f"{launch.size or 'several'} processes, but mpi4py uses {library}, which "
            "treats each one as a separate job; start them with that MPI's mpiexec, or build "
            "mpi4py for the launcher's MPI (pip install --no-binary mpi4py mpi4py)"
        )
    return library


def _connect_over_mpi(
    launch: Launch, machine: Machine | None
) -> tuple[Launch, socket.socket | None]:
    """Return `launch` with the rank and size from MPI, and the socket for `Monitor.connect`.

    All processes must call this, after `start_mpi`. The socket is None for a single process.
    Raises `PeerLost` if process 0 cannot be reached within `ANSWER` seconds or cannot listen on a
    port.
    """
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    launch = replace(launch, rank=world.rank, size=world.size)
    if world.size == 1:
        return launch, None
    message = bytearray(1024)
    if world.rank == 0:
        server = listen(":0")
        address = [*_host_identity(), _outside_name(machine), server.getsockname()[1]]
        message[:] = json.dumps(address).encode().ljust(len(message))
    world.Bcast(message, root=0)
    *host, name, port = json.loads(bytes(message))
    name = "127.0.0.1" if host == _host_identity() else name
    if world.rank == 0:
        return launch, server
    return launch, connect_to_rank0(f"{name}:{port}", world.rank, ANSWER)


def listen(address: str) -> socket.socket:
    """Return a listening socket on the port of `address` (0 for any free port).

    It listens on all network interfaces. Process 0 and the supervisor use it. Raises `PeerLost` if
    the port cannot be used.
    """
    v6 = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if v6 else socket.AF_INET
    port = int(address.rpartition(":")[2])
    try:
        return socket.create_server(("", port), family=family, dualstack_ipv6=v6, backlog=1024)
    except OSError as error:
        raise PeerLost(
            f"{address}: process 0 cannot listen on this port ({error.strerror}); set "
            "JAXGPT_COORDINATOR to another host:port on all processes"
        ) from None


def connect_to_rank0(address: str, rank: int, timeout: float) -> socket.socket:
    """Return a socket connected to process 0 at host:port, retrying until process 0 listens.

    The socket's timeout is `ANSWER` seconds. Raises `PeerLost` if connecting still fails after
    `timeout` seconds.
    """
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + timeout
    while True:
        try:
            return socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER)
        except (OSError, UnicodeError) as error:  # UnicodeError: a malformed host name
            if time.monotonic() > deadline:
                raise PeerLost(
                    f"process {rank} on host {socket.gethostname()} cannot reach process 0 at "
                    f"{address} ({error}) within {timeout:.0f} s (--init-timeout); if process 0 "
                    "has started, set JAXGPT_COORDINATOR=host:port, with a name or address of "
                    "its host that all hosts can reach"
                ) from None
            time.sleep(SETTLE / 5)
