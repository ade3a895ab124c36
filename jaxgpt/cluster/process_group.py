"""The processes of a job: who they are, and how they agree on something before JAX is up."""

import contextlib
import json
import os
import platform
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from jaxgpt.cluster.environment import (
    COORDINATOR,
    Launch,
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
    rank: int = 0
    size: int = 1
    local_rank: int = 0  # this process among those of its host, from 0
    local_size: int = 1
    hosts: tuple[int, ...] = (0,)  # for each process, the rank of the first process on its host
    host_names: tuple[str, ...] = ("localhost",)  # for each process, the name of its host
    machine: Machine | None = None  # None if it is not in MACHINES
    mpi_library: str | None = None
    timeout: float = INIT_TIMEOUT  # seconds that processes wait for each other when the job starts
    notes: tuple[str, ...] = ()  # lines for the log about problems that were worked around
    transport: Transport | None = None  # None if there is but one process
    # Connections, locks and the like, given up at the end of the group's `with`.
    on_close: contextlib.ExitStack = field(default_factory=contextlib.ExitStack, compare=False)

    def __enter__(self) -> "ProcessGroup":
        return self

    def __exit__(self, *error: object) -> None:
        self.on_close.close()  # the group can be joined again; MPI stays, as it starts only once

    @property
    def is_main(self) -> bool:
        """True on process 0, the one that prints and writes metrics."""
        return self.rank == 0

    def broadcast(self, value: Any) -> Any:
        """Return process 0's `value` (anything that JSON holds) on every process."""
        return self.allgather(value if self.is_main else None)[0]

    def allgather(self, value: Any) -> list[Any]:
        """Return every process's `value` (anything that JSON holds) by rank, on every process."""
        if self.transport is None:
            return [value]
        return [json.loads(m) for m in self.transport.allgather(json.dumps(value).encode())]

    def barrier(self) -> None:
        """Wait for all, as before the first collective: Gloo gives up on one that is 30 s late."""
        self.allgather(None)

    @contextlib.contextmanager
    def name_lost_peers(self) -> Iterator[None]:
        """Turn what a collective raises at another process's end into `PeerLost`."""
        try:
            yield
        except (UsageError, PeerLost):
            raise
        except Exception as error:  # of XLA, Gloo or a socket: it may be the end of another process
            time.sleep(0.5)  # for the connections of a dying process to close
            lost = self.transport.lost_peers() if self.transport else []
            if not lost:
                raise
            raise PeerLost(*([lost_sentence(lost[0])] if self.is_main else [])) from error

    def raise_if_any(self, error: str | None) -> None:
        """Raise on every process the error of the first one that has one, as a `UsageError`."""
        if found := [e for e in self.allgather(error) if e]:
            raise UsageError(found[0])

    def run_on_all(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call `function` on every process; a `UsageError` on any of them is raised on all."""
        result, error = catch_usage_error(function, *arguments)
        self.raise_if_any(error)
        return result


def catch_usage_error(function: Callable[..., T], *arguments: Any) -> tuple[T | None, str | None]:
    """Return the function's result, or its `UsageError` as a text for `raise_if_any`."""
    try:
        return function(*arguments), None
    except UsageError as error:
        return None, str(error)


def own_host(group: ProcessGroup) -> str:
    """Return a name of this host at which all processes reach it."""
    if group.local_size == group.size:
        return "127.0.0.1"
    if given := os.environ.get(COORDINATOR):
        return given.rpartition(":")[0].strip("[]")
    if group.machine:
        return high_speed_name(group.machine, platform.node())
    return reachable_name()


def join_process_group(
    timeout: float = INIT_TIMEOUT,
    launch: Launch | None = None,
    on_arrival: Callable[[ProcessGroup], None] = lambda group: None,
) -> ProcessGroup:
    """Wait, without JAX, until all processes of a job are there; by default the environment's.

    `on_arrival` is called with the group, and is within the limit.

    Raises `UsageError` if the launcher's environment or the MPI library does not fit, `PeerLost`
    if processes, which it names, do not come within `timeout` seconds.
    """
    launch = launch or find_launch(os.environ)
    with arrival_limit(launch, timeout) if launch.through == "mpi" else contextlib.nullcontext():
        group = _join(launch, timeout)
        on_arrival(group)
    if group.transport:
        group.transport.all_are_here()
    return group


def _join(launch: Launch, timeout: float) -> ProcessGroup:
    notes: tuple[str, ...] = ()
    transport = library = None
    if launch.through == "mpi":
        try:
            transport = MpiTransport(launch, timeout)
            library = transport.library
        except UsageError as error:
            if not started_by_srun(os.environ):
                raise
            # srun tells all that is needed, whatever MPI mpi4py was built with.
            launch = slurm_step(os.environ)
            notes = (f"going on without MPI, by Slurm's variables: {error}",)
    if launch.through == "tcp":
        transport = TcpTransport(launch, timeout)
    told = "; ".join(words for words in (launch.variable, library) if words)
    host = socket.gethostname()
    group = ProcessGroup(
        launcher=f"{launch.launcher} ({told})" if told else launch.launcher,
        rank=transport.rank if transport else 0,
        size=transport.size if transport else 1,
        machine=find_machine(host, os.environ),
        mpi_library=library,
        timeout=timeout,
        notes=notes,
        transport=transport,
    )
    if transport:
        group.on_close.callback(transport.close)
    boot_id = Path("/proc/sys/kernel/random/boot_id")  # tells apart hosts of the same name
    place = [host, boot_id.read_text() if boot_id.exists() else ""]
    places = [tuple(place) for place in group.allgather(place)]
    first = {place: rank for rank, place in reversed(list(enumerate(places)))}
    hosts = tuple(first[place] for place in places)
    here = hosts[group.rank]
    return replace(
        group,
        local_rank=hosts[: group.rank].count(here),
        local_size=hosts.count(here),
        hosts=hosts,
        host_names=tuple(name for name, _ in places),
    )
