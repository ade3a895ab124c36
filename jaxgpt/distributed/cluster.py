"""Which processes make up this job, and how `jax.distributed` is started among them.

Two stages, so that mistakes are reported before anything slow happens: `find_cluster` looks at
the launcher's environment and talks over MPI without importing JAX; `connect` starts JAX.
"""

import contextlib
import glob
import json
import math
import os
import platform
import socket
import sys
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any, TypeVar

from jaxgpt.config import UsageError

T = TypeVar("T")

# Set by MPI launchers for each process they start: MPICH and Intel MPI (Hydra), Open MPI, PMIx,
# and Cray PALS. Without one of them mpi4py is not imported: it can abort on login nodes.
MPI_VARIABLES = (
    "PMI_RANK",
    "PMIX_RANK",
    "OMPI_COMM_WORLD_RANK",
    "PALS_RANKID",
    "MPI_LOCALRANKID",
)
SIZE_VARIABLES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE")
RANK_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "PALS_RANKID")

# A process of a CPU job may wait long for others that share its cores; XLA's default is 40 s.
CPU_COLLECTIVE_FLAGS = (
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=120",
    "--xla_cpu_collective_call_terminate_timeout_seconds=600",
)
# NVIDIA, AMD, Intel and Google devices, where a process can see them.
ACCELERATOR_FILES = ("/dev/nvidia[0-9]*", "/dev/kfd", "/dev/dri/renderD*", "/dev/accel[0-9]*")
# What narrows the devices that a process sees; set by users and by some launchers.
VISIBLE_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
)

INITIALIZATION_TIMEOUT = 300  # seconds for all processes to arrive
HEARTBEAT_TIMEOUT = 100  # seconds after which a silent process counts as dead


@dataclass(frozen=True)
class Cluster:
    """The processes of one job, as one of them sees it."""

    launcher: str
    """What started the job, in words."""
    rank: int = 0
    """This process, from 0."""
    size: int = 1
    """Number of processes."""
    local_rank: int = 0
    """This process among those of its host, from 0."""
    local_size: int = 1
    """Number of processes on this host."""
    hosts: tuple[int, ...] = (0,)
    """Of each process, the rank of the first process on its host."""
    comm: Any = None
    """The MPI communicator of all processes, or None."""

    @property
    def is_main(self) -> bool:
        """Whether this is process 0, the one that prints and writes metrics."""
        return self.rank == 0

    def broadcast(self, value: Any) -> Any:
        """Process 0's `value` (anything that JSON holds), on every process.

        Waits without spinning: the processes may share cores with the one that is at work.
        """
        if self.comm is None:
            return value
        content = bytearray(json.dumps(value).encode()) if self.is_main else None
        length = bytearray((len(content) if self.is_main else 0).to_bytes(8, "little"))
        self._wait(self.comm.Ibcast(length, root=0))
        content = content or bytearray(int.from_bytes(length, "little"))
        self._wait(self.comm.Ibcast(content, root=0))
        return json.loads(content)

    def agree(self, error: str | None) -> None:
        """Raises on every process the error of the first process that has one.

        Raises:
            UsageError: if any process passed an `error`.
        """
        errors = [error]
        if self.comm is not None:
            longest = 2000
            mine = (error or "").encode()[:longest].ljust(longest)
            everyone = bytearray(longest * self.size)
            self._wait(self.comm.Iallgather(mine, everyone))
            words = [everyone[i * longest : (i + 1) * longest] for i in range(self.size)]
            errors = [w.decode(errors="replace").strip() for w in words]
        for found in errors:
            if found:
                raise UsageError(found)

    def together(self, function: Callable[..., T], *arguments: Any) -> T:
        """What `function` returns on this process, once it has returned on all of them.

        Raises:
            UsageError: on every process, if `function` raised one on any.
        """
        result, error = None, None
        try:
            result = function(*arguments)
        except UsageError as e:
            error = str(e)
        self.agree(error)
        return result

    @staticmethod
    def _wait(request: Any) -> None:
        while not request.Test():
            time.sleep(0.005)


def guessed_rank() -> int:
    """This process's rank by its environment alone, to keep others silent before MPI is up."""
    return next((int(os.environ[v]) for v in RANK_VARIABLES if v in os.environ), 0)


def find_cluster() -> Cluster:
    """Who this process is, by mpi4py where an MPI launcher is seen, else a single process.

    Raises:
        UsageError: if the launcher started several processes that MPI sees as separate jobs.
    """
    seen = [v for v in MPI_VARIABLES if v in os.environ]
    if not seen:
        return Cluster(launcher="single process")
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise UsageError(
            f"{seen[0]}={os.environ[seen[0]]}: an MPI launcher started this process but mpi4py "
            f"cannot load an MPI library ({error}); pip install 'jaxgpt[mpi]' brings MPICH"
        ) from None
    comm = MPI.COMM_WORLD
    library = MPI.Get_library_version().split("\n")[0].replace("\x00", "").strip()
    for variable in SIZE_VARIABLES:
        launched = int(os.environ.get(variable, 1))
        if launched > 1 and comm.size == 1:
            raise UsageError(
                f"{variable}={launched}: the launcher started {launched} processes but MPI sees "
                f"only one; mpi4py uses {library}, which is not the launcher's MPI"
            )
    host = comm.Split_type(MPI.COMM_TYPE_SHARED)
    first, hosts = array("i", [comm.rank]), array("i", [0] * comm.size)
    host.Bcast(first, root=0)
    comm.Allgather(first, hosts)
    return Cluster(
        launcher=f"MPI ({library}; {seen[0]} is set)",
        rank=comm.rank,
        size=comm.size,
        local_rank=host.rank,
        local_size=host.size,
        hosts=tuple(hosts),
        comm=comm,
    )


def accelerator_expected() -> bool:
    """Whether JAX will look for something other than CPUs here, judged without importing JAX."""
    platforms = os.environ.get("JAX_PLATFORMS", "")
    if platforms:
        return platforms != "cpu"
    has_plugin = bool(metadata.entry_points(group="jax_plugins"))
    return has_plugin and any(glob.glob(pattern) for pattern in ACCELERATOR_FILES)


def cpu_devices_per_process(mesh: tuple[int, ...], cluster: Cluster) -> int:
    """Simulated devices that each process brings to a CPU job: mesh product / processes.

    `JAX_NUM_CPU_DEVICES`, where set, wins. A mesh with -1 takes one device per process, or as
    many as its known sizes need.

    Raises:
        UsageError: if the processes do not divide the mesh.
    """
    wanted = os.environ.get("JAX_NUM_CPU_DEVICES")
    if wanted is not None:
        if not wanted.isdigit() or int(wanted) < 1:
            raise UsageError(f"JAX_NUM_CPU_DEVICES={wanted}: must be a whole number, at least 1")
        return int(wanted)
    known = math.prod(size for size in mesh if size > 0)
    if -1 in mesh:  # the open axis takes what the processes have too many
        return math.lcm(known, cluster.size) // cluster.size
    if known % cluster.size:
        shape = ",".join(map(str, mesh))
        raise UsageError(
            f"parallel.mesh={shape}: its {known} devices cannot be shared out over "
            f"{cluster.size} processes; the number of processes must divide the mesh's product"
        )
    return known // cluster.size


def connect(cluster: Cluster, mesh: tuple[int, ...]) -> dict[str, Any]:
    """Starts JAX on this process and, in a job of several, `jax.distributed`.

    Args:
        mesh: sizes as `config.mesh_sizes` gives them; on CPUs they say how many devices each
            process simulates.

    Returns:
        What was found, for the log and cluster.json.
    """
    os.environ["XLA_FLAGS"] = " ".join([*CPU_COLLECTIVE_FLAGS, os.environ.get("XLA_FLAGS", "")])
    cpu_devices = cpu_devices_per_process(mesh, cluster) if not accelerator_expected() else None
    import jax

    if cpu_devices is not None:
        # JAX refuses once it has started (in a notebook): then the devices are what they are.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", cpu_devices)
    coordinator = None
    if cluster.size > 1:
        _keep_stdout_for_python()
        coordinator = cluster.broadcast(_free_address(cluster))
        jax.distributed.initialize(
            coordinator,
            num_processes=cluster.size,
            process_id=cluster.rank,
            local_device_ids=_own_devices(cluster),
            cluster_detection_method="deactivate",  # or JAX picks devices by SLURM_LOCALID
            initialization_timeout=INITIALIZATION_TIMEOUT,
            heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT,
        )
    devices = jax.devices()
    return {
        "launcher": cluster.launcher,
        "coordinator": coordinator,
        "host": platform.node(),
        "processes": cluster.size,
        "processes_on_host": cluster.local_size,
        "devices": len(devices),
        "devices_per_process": jax.local_device_count(),
        "device_kind": devices[0].device_kind,
        "simulated": devices[0].platform == "cpu" and jax.local_device_count() > 1,
        "jax": jax.__version__,
    }


def describe(facts: dict[str, Any]) -> list[str]:
    """Lines for the log about what `connect` found."""
    processes = f"{facts['processes']} process" + ("es" if facts["processes"] > 1 else "")
    simulated = " simulated" if facts["simulated"] else ""
    return [
        f"launcher: {facts['launcher']}",
        f"processes: {facts['processes']}, {facts['processes_on_host']} of them on this host, "
        f"{facts['host']}; coordinator {facts['coordinator'] or 'not needed'}",
        f"devices: {facts['devices']}{simulated} x {facts['device_kind']}, "
        f"{facts['devices_per_process']} on each of {processes}; jax {facts['jax']}",
    ]


def _keep_stdout_for_python() -> None:
    """Gloo, from C++, prints a line per process and group to stdout: give it another one."""
    sys.stdout.flush()
    ours = os.dup(1)
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)
    sys.stdout = open(ours, "w", buffering=1, encoding=sys.stdout.encoding, errors="replace")


def _free_address(cluster: Cluster) -> str:
    """host:port on process 0 that the others can connect to."""
    host = "127.0.0.1" if cluster.local_size == cluster.size else socket.getfqdn()
    with socket.socket() as s:
        s.bind(("", 0))
        return f"{host}:{s.getsockname()[1]}"


def _own_devices(cluster: Cluster) -> list[int] | None:
    """Which of the host's accelerators this process takes; None takes all that it sees.

    Processes of one host share them out evenly. One that sees a single device has been given it
    by the launcher.
    """
    if cluster.local_size == 1 or not accelerator_expected():
        return None
    narrowed = [os.environ[v].split(",") for v in VISIBLE_VARIABLES if os.environ.get(v)]
    seen = len(narrowed[0]) if narrowed else len(glob.glob(ACCELERATOR_FILES[0]))
    if seen == 1:
        return None
    each = max(1, seen // cluster.local_size)
    return list(range(cluster.local_rank * each, (cluster.local_rank + 1) * each))
