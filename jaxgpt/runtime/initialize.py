"""Starting JAX on the processes of a job: its devices, and `jax.distributed` among them."""

import contextlib
import math
import os
import platform
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from jaxgpt.cluster.accelerators import (
    VISIBLE_VARIABLES,
    accelerator_expected,
    count_accelerators,
)
from jaxgpt.cluster.environment import COORDINATOR, check_address
from jaxgpt.cluster.hosts import HOST_FILES
from jaxgpt.cluster.process_group import ProcessGroup, coordinator_host
from jaxgpt.cluster.shutdown import end_with_the_first_to_fail
from jaxgpt.cluster.transport import PeerLost, TcpTransport
from jaxgpt.config import UsageError
from jaxgpt.runtime.allocator import keep_freed_memory, reserve_gpu_memory
from jaxgpt.runtime.gloo import set_gloo_interface
from jaxgpt.runtime.xla_flags import CPU_COLLECTIVES, add_xla_flags

JOBS = (("PBS", "PBS_JOBID"), ("Slurm", "SLURM_JOB_ID"), ("Cobalt", "COBALT_JOBID"))
MAX_CPU_DEVICES = 2048  # XLA simulates no more in one process
# Settings of JAX that decide about numbers, or what can be compiled: results are to be those
# of the configuration, on any machine.
PINNED = {
    "jax_enable_x64": False,
    "jax_disable_jit": False,
    "jax_default_prng_impl": "threefry2x32",
    "jax_threefry_partitionable": True,
    "jax_random_seed_offset": 0,
    "jax_numpy_dtype_promotion": "standard",
}
CHECK_DRIVER = (
    "check the driver and the plugin (for NVIDIA GPUs pip install 'jaxgpt[cuda]', or "
    "'jaxgpt[cuda12]' for its older drivers), or set JAX_PLATFORMS=cpu"
)
HEARTBEAT_TIMEOUT = 100  # seconds after which a silent process counts as dead


def cpu_devices_per_process(mesh: tuple[int, ...], cluster: ProcessGroup) -> int:
    """Simulated devices that each process brings to a CPU job: mesh product / processes.

    `JAX_NUM_CPU_DEVICES`, where set, wins. A mesh with -1 takes one device per process, or as
    many as its known sizes need.

    Raises:
        UsageError: if the processes do not divide the mesh, or have to bring too many.
    """
    wanted = os.environ.get("JAX_NUM_CPU_DEVICES")
    if wanted is not None:
        if not wanted.isdigit() or not 1 <= int(wanted) <= MAX_CPU_DEVICES:
            raise UsageError(
                f"JAX_NUM_CPU_DEVICES={wanted}: must be a whole number from 1 to {MAX_CPU_DEVICES}"
            )
        return int(wanted)
    known = math.prod(size for size in mesh if size > 0)
    shape = ",".join(map(str, mesh))
    if known > MAX_CPU_DEVICES * cluster.size:
        raise UsageError(
            f"parallel.mesh={shape}: its {known} devices are too many; on a CPU a process can "
            f"simulate {MAX_CPU_DEVICES}"
        )
    if -1 in mesh:  # the open axis takes what the processes have too many
        return math.lcm(known, cluster.size) // cluster.size
    if known % cluster.size:
        raise UsageError(
            f"parallel.mesh={shape}: its {known} devices cannot be shared out over "
            f"{cluster.size} processes; the number of processes must divide the mesh's product"
        )
    return known // cluster.size


def connect(
    cluster: ProcessGroup,
    mesh: tuple[int, ...],
    mark: Callable[[str], None] = lambda phase: None,
    stops_at_steps: bool = False,
    examines: bool = False,
) -> dict[str, Any]:
    """Starts JAX on this process and, in a job of several, `jax.distributed`.

    Args:
        mesh: sizes as `config.mesh_sizes` gives them; on CPUs they say how many devices each
            process simulates.
        mark: is called with the name of each phase of the start when it ends.
        stops_at_steps: on SIGTERM at a step that the processes agree on, see `exits.StopSignal`;
            else SIGTERM does what it did before.
        examines: take CPUs also where accelerators are expected, for the doctor to say so.

    Returns:
        What was found, for the log and cluster.json.

    Raises:
        PeerLost: if the coordinator cannot be reached.
        UsageError: if processes and devices do not fit, if JAX cannot start its devices, or if
            XLA_FLAGS names a file.
    """
    add_xla_flags(*CPU_COLLECTIVES)
    notes = list(cluster.notes)
    cpu_devices = None
    if accelerator_expected():
        notes += reserve_gpu_memory()
    else:
        notes += keep_freed_memory()
        cpu_devices = cpu_devices_per_process(mesh, cluster)
    coordinator = None
    if cluster.size > 1:
        notes += clear_proxies()
    import jax

    notes += pin_settings()
    mark("imports")
    if cpu_devices is not None:
        # JAX refuses once it has started (in a notebook): then the devices are what they are.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", cpu_devices)
    if cluster.size > 1:
        _keep_stdout_for_python()
        jax.config.update("jax_enable_preemption_service", stops_at_steps)
        coordinator = cluster.broadcast(cluster.run_on_all(_free_address, cluster))
        devices = local_device_ids(cluster)
        if cluster.rank:
            await_coordinator(cluster, coordinator)
        jax.distributed.initialize(
            coordinator,
            num_processes=cluster.size,
            process_id=cluster.rank,
            local_device_ids=devices,
            cluster_detection_method="deactivate",  # or JAX picks devices by SLURM_LOCALID
            initialization_timeout=math.ceil(cluster.timeout),
            heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT,
        )
        set_gloo_interface(cluster, coordinator)
        if isinstance(cluster.transport, TcpTransport):
            end_with_the_first_to_fail()
    mark("distributed init")
    try:
        devices = jax.devices()
    except (RuntimeError, AssertionError) as error:  # an AssertionError says nothing more
        asked = os.environ.get("JAX_PLATFORMS")
        what = f"JAX_PLATFORMS={asked}" if asked else "devices"
        raise UsageError(
            f"{what}: JAX cannot start them ({' '.join(str(error).split()) or 'no such devices'});"
            f" {CHECK_DRIVER}"
        ) from None
    may_be_cpu = examines or cpu_devices is not None or os.environ.get("JAX_PLATFORMS")
    if devices[0].platform == "cpu" and not may_be_cpu:
        raise UsageError(
            "devices: this host has accelerators, and their plugin has given JAX none; its words "
            f"are above: {CHECK_DRIVER}"
        )
    mark("devices")
    return {
        "launcher": cluster.launcher,
        "coordinator": coordinator,
        "host": platform.node(),
        "machine": cluster.machine.name if cluster.machine else None,
        "scheduler": next((name for name, variable in JOBS if variable in os.environ), None),
        "job": next((os.environ[variable] for _, variable in JOBS if variable in os.environ), None),
        "host_file": next((os.environ[v] for v in HOST_FILES if os.environ.get(v)), None),
        "hosts": list(dict.fromkeys(cluster.host_names)),
        "processes": cluster.size,
        "processes_on_host": cluster.local_size,
        "devices": len(devices),
        "devices_per_process": jax.local_device_count(),
        "device_kind": devices[0].device_kind,
        "simulated": devices[0].platform == "cpu" and jax.local_device_count() > 1,
        "jax": jax.__version__,
        "notes": notes,
    }


def pin_settings() -> list[str]:
    """Sets what `PINNED` says, whatever the environment does.

    Returns:
        Lines for the log about what was different.
    """
    import jax

    found = {name: getattr(jax.config, name) for name in PINNED}
    for name, value in PINNED.items():
        jax.config.update(name, value)
    return [
        f"warning: {name.upper()}={found[name]}: is {value} here, as it decides about results"
        for name, value in PINNED.items()
        if found[name] != value
    ]


def describe(facts: dict[str, Any]) -> list[str]:
    """Lines for the log about what `connect` found."""
    processes = f"{facts['processes']} process" + ("es" if facts["processes"] > 1 else "")
    simulated = " simulated" if facts["simulated"] else ""
    machine = f", {facts['machine']}" if facts["machine"] else ""
    n_hosts = len(facts["hosts"])
    return [
        f"launcher: {facts['launcher']}",
        f"processes: {facts['processes']} on {n_hosts} host{'s' * (n_hosts > 1)}{machine}; "
        f"{facts['processes_on_host']} on {facts['host']}, this host; "
        f"coordinator {facts['coordinator'] or 'not needed'}",
        f"devices: {facts['devices']}{simulated} x {facts['device_kind']}, "
        f"{facts['devices_per_process']} on each of {processes}; jax {facts['jax']}",
        *facts["notes"],
    ]


def local_device_ids(cluster: ProcessGroup) -> list[int] | None:
    """Which of the host's accelerators this process takes; None takes all that it sees.

    Processes of one host that see the same ones share them out evenly. One that sees a single
    device has been given it by the launcher, and so has one that sees others than its mates do.

    Raises:
        UsageError: on every process, if a host has more processes than devices.
    """
    visible = next((os.environ[v] for v in VISIBLE_VARIABLES if os.environ.get(v)), None)
    everyone = zip(cluster.allgather(visible), cluster.hosts, strict=True)
    mates = [theirs for theirs, host in everyone if host == cluster.hosts[cluster.rank]]
    machine = cluster.machine
    seen = visible.split(",") if visible else [str(i) for i in range(count_accelerators())]
    if not seen and machine:  # Intel's files do not tell tiles apart
        seen = [str(i) for i in range(machine.devices_per_host)]
    n_sharing, place = mates.count(visible), mates[: cluster.local_rank].count(visible)
    if n_sharing == 1 or not accelerator_expected():
        error = chosen = None
    else:
        error, chosen = _share(len(seen), n_sharing, place)
    cluster.raise_if_any(error)
    if chosen and machine and machine.device == "pvc":  # JAX's own setting is for CUDA and ROCm
        os.environ["ZE_AFFINITY_MASK"] = ",".join(seen[i] for i in chosen)
    return chosen


def _share(seen: int, n_sharing: int, place: int) -> tuple[str | None, list[int] | None]:
    """An error, or the devices of the process that has this place among those that share."""
    if seen < 2:  # one, or of a kind whose files do not tell
        return None, None
    if seen < n_sharing:
        return (
            f"processes on host {platform.node()}={n_sharing}: more than its {seen} "
            "devices; start at most one process per device"
        ), None
    each = seen // n_sharing
    return None, list(range(place * each, (place + 1) * each))


def await_coordinator(cluster: ProcessGroup, address: str) -> None:
    """Returns when process 0 can be reached; JAX would abort with a stack trace if not.

    Raises:
        PeerLost: after `cluster.timeout` seconds, and a sentence for the user.
    """
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + cluster.timeout
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                print(
                    f"error: process {cluster.rank} on host {platform.node()} cannot reach the "
                    f"coordinator at {address} ({error}) within {cluster.timeout:.0f} s "
                    "(--init-timeout); set JAXGPT_COORDINATOR=host:port to a name of process 0's "
                    "host that all hosts can reach",
                    file=sys.stderr,
                    flush=True,
                )
                raise PeerLost from None
            time.sleep(0.1)


def clear_proxies() -> list[str]:
    """Takes *_proxy out of the environment: gRPC would send them what is for another host."""
    found = sorted(name for name in os.environ if name.lower().endswith("_proxy"))
    found = [name for name in found if name.lower() != "no_proxy"]
    for name in found:
        del os.environ[name]
    if not found:
        return []
    return [f"cleared {', '.join(found)}: the processes speak to each other without a proxy"]


def _keep_stdout_for_python() -> None:
    """Gloo, from C++, prints a line per process and group to stdout: give it another one."""
    sys.stdout.flush()
    ours = os.dup(1)
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)
    sys.stdout = open(ours, "w", buffering=1, encoding=sys.stdout.encoding, errors="replace")


def _free_address(cluster: ProcessGroup) -> str | None:
    """host:port on process 0 that the others can connect to; None on the others."""
    if not cluster.is_main:
        return None
    if os.environ.get(COORDINATOR):
        check_address(COORDINATOR, os.environ[COORDINATOR])
        return os.environ[COORDINATOR]
    with socket.socket() as s:
        s.bind(("", 0))
        return f"{coordinator_host(cluster)}:{s.getsockname()[1]}"
