"""Starting JAX and `jax.distributed` on the processes of a job."""

import ipaddress
import math
import os
import platform
import re
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

from jaxgpt.cluster.environment import COORDINATOR, check_address
from jaxgpt.cluster.hardware import visible_devices
from jaxgpt.cluster.hosts import HOST_FILES, address_towards
from jaxgpt.cluster.launch_line import launch_line
from jaxgpt.cluster.process_group import ProcessGroup, connect_to_rank0, own_host
from jaxgpt.config import MeshShape, UsageError
from jaxgpt.runtime.allocator import keep_freed_memory, reserve_gpu_memory
from jaxgpt.runtime.devices import (
    agree_on_accelerators,
    cpu_devices_per_process,
    local_device_ids,
)
from jaxgpt.runtime.jax_internals import set_gloo_hostname
from jaxgpt.runtime.xla_flags import CPU_COLLECTIVES, add_xla_flags

JOBS = (("PBS", "PBS_JOBID"), ("Slurm", "SLURM_JOB_ID"))
# JAX settings that affect results. They are fixed, so that only the configuration changes results.
PINNED = {
    "jax_enable_x64": False,
    "jax_disable_jit": False,
    "jax_default_prng_impl": "threefry2x32",
    "jax_threefry_partitionable": True,
    "jax_random_seed_offset": 0,
    "jax_numpy_dtype_promotion": "standard",
}
CHECK_DRIVER = (
    "check the driver and the plugin (for NVIDIA GPUs, pip install 'jaxgpt[cuda]', or "
    "'jaxgpt[cuda12]' for older drivers), or set JAX_PLATFORMS=cpu"
)


def initialize_jax(
    cluster: ProcessGroup,
    shape: MeshShape,
    on_phase: Callable[[str], None] = lambda phase: None,
    preemption: bool = False,
    allow_cpu: bool = False,
) -> dict[str, Any]:
    """Start JAX on this process, and connect the processes if the job has several.

    Every process must call this. This function sets environment variables, the JAX settings in
    `PINNED` and, on CPUs, malloc options. In a job with several processes, it also unsets proxy
    variables. When it connects the processes, it replaces sys.stdout and discards other output to
    stdout.

    Args:
        cluster: the processes of the job.
        shape: mesh shape, which determines the number of simulated CPU devices.
        on_phase: called with the name of each startup phase when it begins.
        preemption: whether JAX catches SIGTERM for `preemption_sync_point`. This has no effect in a
            job with a single process, or if the processes are already connected.
        allow_cpu: accept CPUs even if accelerators are expected. If JAX_PLATFORMS is set, CPUs are
            always accepted.

    Returns:
        A JSON-serializable dict of facts about the job, its devices and JAX, for the log and
        `cluster.json`. `coordinator` is host:port, or None if there is a single process or the
        processes were already connected. `notes` is a list of log lines. `ranks` has a dict with
        `host` and `devices` for each process.

    Raises:
        PeerLost: on processes that cannot reach the coordinator.
        UsageError: if the devices do not start, if accelerators are expected but JAX finds only
            CPUs, or if JAX has already started with too few CPU devices.

    XLA terminates the process if XLA_FLAGS contains an unknown flag, or if the processes do not
    connect within `cluster.timeout` seconds.
    """
    on_phase("imports")
    add_xla_flags(*CPU_COLLECTIVES)
    notes = list(cluster.notes)
    cpu_devices = None
    if agree_on_accelerators(cluster):
        notes += reserve_gpu_memory()
    else:
        cpu_devices = cpu_devices_per_process(shape, cluster)
        notes += keep_freed_memory()
        if (flag := "--xla_force_host_platform_device_count") in os.environ.get("XLA_FLAGS", ""):
            notes.append(f"warning: XLA_FLAGS: {flag} has no effect; --mesh sets the CPU devices")
    if cluster.size > 1:
        notes += clear_proxies()
    import jax

    notes += pin_settings()
    on_phase("distributed init")
    if cpu_devices is not None:
        try:
            jax.config.update("jax_num_cpu_devices", cpu_devices)
        except RuntimeError:  # JAX has already started, as in a notebook; keep its devices
            if jax.local_device_count() < cpu_devices:
                raise UsageError(
                    f"parallel.mesh={shape}: needs {cpu_devices} devices, but JAX has already "
                    f"started with {jax.local_device_count()}; restart Python, and call "
                    f"jax.config.update('jax_num_cpu_devices', {cpu_devices}) first"
                ) from None
    coordinator = None
    if cluster.size > 1 and not jax.distributed.is_initialized():
        coordinator = _start_distributed(cluster, preemption)
    on_phase("devices")
    allow_cpu = allow_cpu or cpu_devices is not None or bool(os.environ.get("JAX_PLATFORMS"))
    devices = _start_devices(allow_cpu)
    return _facts(cluster, devices) | {"coordinator": coordinator, "notes": notes}


def _start_distributed(cluster: ProcessGroup, preemption: bool) -> str:
    """Connect the processes with `jax.distributed`. Return the coordinator's host:port."""
    import jax

    _keep_stdout_for_python()
    jax.config.update("jax_enable_preemption_service", preemption)
    coordinator = cluster.run_on_main(_free_address, cluster)
    devices = local_device_ids(cluster)
    if cluster.rank:
        # Try to connect first, because JAX would abort with a stack trace on failure.
        connect_to_rank0(coordinator, cluster.rank, cluster.timeout).close()
    jax.distributed.initialize(
        coordinator,
        num_processes=cluster.size,
        process_id=cluster.rank,
        local_device_ids=devices,
        cluster_detection_method="deactivate",  # otherwise, JAX selects devices by SLURM_LOCALID
        initialization_timeout=math.ceil(cluster.timeout),
        # The monitor finds lost hosts and hangs. JAX would also abort a job that was suspended.
        heartbeat_timeout_seconds=10**6,
    )
    set_gloo_hostname(_outward_address(cluster, coordinator.rpartition(":")[0].strip("[]")))
    return coordinator


def _start_devices(allow_cpu: bool) -> list[Any]:
    import jax

    try:
        devices = jax.devices()
    except (RuntimeError, AssertionError) as error:  # an AssertionError has no message
        reason = " ".join(str(error).split()) or "no such devices"
        raise UsageError(
            f"JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')}: JAX cannot start these devices "
            f"({reason}); {CHECK_DRIVER}"
        ) from None
    if devices[0].platform == "cpu" and not allow_cpu:
        raise UsageError(
            "devices: this host has accelerators, but the JAX plugin found none (see its messages "
            f"above); {CHECK_DRIVER}"
        )
    return devices


def _facts(cluster: ProcessGroup, devices: list[Any]) -> dict[str, Any]:
    import jax

    scheduler, variable = next((job for job in JOBS if job[1] in os.environ), (None, ""))
    return {
        "launcher": cluster.launcher,
        "host": platform.node(),
        "machine": cluster.machine.name if cluster.machine else None,
        "scheduler": scheduler,
        "job": os.environ.get(variable),
        "host_file": next((os.environ[v] for v in HOST_FILES if os.environ.get(v)), None),
        "hosts": list(dict.fromkeys(cluster.host_names)),
        "processes": cluster.size,
        "processes_on_host": cluster.local_size,
        "devices": len(devices),
        "devices_per_process": jax.local_device_count(),
        "device_kind": devices[0].device_kind,
        "simulated": devices[0].platform == "cpu" and jax.local_device_count() > 1,
        "ranks": [
            {"host": host, "devices": own}
            for host, own in zip(cluster.host_names, cluster.allgather(_own_devices()), strict=True)
        ],
        "collectives": _collectives_library(devices[0]) if len(devices) > 1 else None,
        "launch_line": launch_line(os.environ),
        "jax": jax.__version__,
    }


def preemption_sync_point(step: int, requested: bool) -> bool | None:
    """Return whether all processes must stop after `step`.

    Set `requested` if this process has just been asked to stop. The process then sends itself
    SIGTERM, which JAX catches. Every process must call this for each step. If `jax.distributed` is
    not used, this sends no signal and returns None. If it is used, the processes must have been
    connected with `preemption=True`.
    """
    import jax

    if not jax.distributed.is_initialized():
        return None
    from jax.experimental import multihost_utils

    if requested:  # caught by JAX's preemption service, not by Python
        os.kill(os.getpid(), signal.SIGTERM)
    return multihost_utils.reached_preemption_sync_point(step)


def pin_settings() -> list[str]:
    """Apply the settings in `PINNED`, and return a warning for each setting that this changes."""
    import jax

    notes = []
    for name, value in PINNED.items():
        if (found := getattr(jax.config, name)) != value:
            jax.config.update(name, value)
            notes.append(f"warning: {name.upper()}={found}: set to {value}, as it affects results")
    return notes


def describe(facts: dict[str, Any]) -> list[str]:
    """Return log lines for the result of `initialize_jax`."""
    simulated = " simulated" if facts["simulated"] else ""
    machine = f", {facts['machine']}" if facts["machine"] else ""
    n_hosts = len(facts["hosts"])
    return [
        f"launcher: {facts['launcher']}",
        *([f"launch line: {facts['launch_line']}"] if facts["launch_line"] else []),
        f"processes: {facts['processes']} on {n_hosts} host{'s' * (n_hosts > 1)}{machine}; "
        f"{facts['processes_on_host']} on {facts['host']}, this host; "
        f"coordinator {facts['coordinator'] or 'not needed'}",
        f"devices: {facts['devices']}{simulated} x {facts['device_kind']}, "
        f"{facts['devices_per_process']} on each process; jax {facts['jax']}",
        *rank_lines(facts["ranks"]),
        f"collectives: {facts['collectives'] or 'none, because there is one device'}",
        *facts["notes"],
    ]


def rank_lines(ranks: list[dict[str, Any]]) -> list[str]:
    """Return one log line per host name. Each line lists the host's ranks and their devices.

    `ranks` is the `ranks` entry in the result of `initialize_jax`.
    """
    on_host: dict[str, list[str]] = {}
    for rank, place in enumerate(ranks):
        on_host.setdefault(place["host"], []).append(f"rank {rank} on {'+'.join(place['devices'])}")
    return [f"host {host}: {', '.join(texts)}" for host, texts in on_host.items()]


def summary(facts: dict[str, Any]) -> str:
    """Return the line about devices and processes for the console header.

    `facts` is the result of `initialize_jax`.
    """
    n_hosts, simulated = len(facts["hosts"]), " simulated" if facts["simulated"] else ""
    where = f"{n_hosts} hosts" if n_hosts > 1 else f"host {facts['host']}"
    launcher = facts["launcher"].partition(" (")[0]
    started = f", {facts['processes']} processes ({launcher})" if facts["processes"] > 1 else ""
    return (
        f"devices: {facts['devices']}{simulated} x {facts['device_kind']} on {where}{started}; jax "
        f"{facts['jax']}"
    )


def _own_devices() -> list[str]:
    """Return the names of this process's devices on its host, such as `gpu 3`.

    On CPUs, return a single name, such as `4 cpu devices` or `cpu`.
    """
    import jax

    devices = jax.local_devices()
    if devices[0].platform == "cpu":
        return [f"{len(devices)} cpu devices" if len(devices) > 1 else "cpu"]
    _, names = visible_devices(os.environ) or ("", [])  # JAX counts only the visible devices
    numbers = [device.local_hardware_id for device in devices]
    numbers = [names[n] if n < len(names) else n for n in numbers]
    return [f"{device.platform} {n}" for device, n in zip(devices, numbers, strict=True)]


def _collectives_library(device: Any) -> str:
    """Return the name of the collectives library for a device.

    For an unknown platform, return the platform's name.
    """
    import jax

    if device.platform == "cpu":
        if jax.process_count() == 1:
            return "XLA, within the process"
        library = jax.config.jax_cpu_collectives_implementation
        return f"{'MPI' if library == 'mpi' else library.capitalize()}, between CPU processes"
    if device.platform == "gpu":
        return "RCCL" if "rocm" in device.client.platform_version.lower() else "NCCL"
    return {"xpu": "oneCCL", "tpu": "the TPU interconnect"}.get(device.platform, device.platform)


def _outward_address(cluster: ProcessGroup, coordinator: str) -> str:
    """Return an IP address that other hosts can use to reach this host.

    If all processes are on one host, this may be a loopback address. All processes must call this.
    """
    # The coordinator's host may resolve its own name to a loopback address. In this case, use its
    # address on the route to another host.
    everyone = cluster.allgather(address_towards(coordinator))
    mine = everyone[cluster.rank]
    outward = [a for a in everyone if not ipaddress.ip_address(a).is_loopback]
    return mine if mine in outward or not outward else address_towards(outward[0])


def clear_proxies() -> list[str]:
    """Unset the *_proxy variables except no_proxy, so that gRPC connects directly.

    Variables with upper-case names are also unset. Returns a list with a log line that names the
    variables, or an empty list if none were set.
    """
    found = sorted(v for v in os.environ if re.fullmatch(r"(?!no_proxy)\w+_proxy", v, re.I))
    for name in found:
        del os.environ[name]
    line = f"cleared {', '.join(found)}: the processes connect to each other without a proxy"
    return [line] if found else []


def _keep_stdout_for_python() -> None:
    """Discard C++ output to stdout, because Gloo prints a line for each process and group."""
    sys.stdout.flush()
    ours = os.dup(1)
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)
    sys.stdout = open(ours, "w", buffering=1, encoding=sys.stdout.encoding, errors="replace")


def _free_address(cluster: ProcessGroup) -> str:
    """Return an address (host:port) on process 0's host for the coordinator."""
    if given := os.environ.get(COORDINATOR):
        check_address(COORDINATOR, given)
        return given
    with socket.socket() as s:
        s.bind(("", 0))
        return f"{own_host(cluster)}:{s.getsockname()[1]}"
