"""Checks of a job's processes, hosts and devices, each with a remedy if it finds a problem."""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np

from jaxgpt.cluster.machines import Machine
from jaxgpt.cluster.process_group import ProcessGroup
from jaxgpt.doctor.facts import SHARED_MEMORY
from jaxgpt.perf.units import GIB, count, format_bytes

MEMORY_PER_PROCESS = GIB  # JAX, Orbax and a small model use about half of it
SHARED_MEMORY_PER_PROCESS = 2**24  # bytes, for MPI and NCCL buffers
# Remedies for known machines whose accelerators JAX does not use, by type of accelerator.
_NVIDIA = "pip install 'jaxgpt[cuda]' ('jaxgpt[cuda12]' with a driver older than 580)"
_AMD = "pip install 'jax[rocm7-local]' (jax-rocm7-plugin; needs ROCm 7)"
PLUGIN_REMEDIES = {
    "a100": f"install the JAX plugin, {_NVIDIA}, or set JAX_PLATFORMS=cpu",
    "mi250x": f"install the JAX plugin, {_AMD}, or set JAX_PLATFORMS=cpu",
    "pvc": "set JAX_PLATFORMS=cpu: the newest plugin for Intel GPUs, intel-extension-for-openxla "
    "0.7.0, supports JAX 0.5.0, which is too old for jaxgpt",
}
PLUGIN_REMEDY = (
    f"install the vendor's JAX plugin (NVIDIA: {_NVIDIA}; AMD: {_AMD}), or set JAX_PLATFORMS=cpu"
)
CLOCK_ROUNDS = 5
CLOCK_TOLERANCE = 1.0  # seconds; processes leave a barrier much closer together than this

Facts = Sequence[SimpleNamespace]  # facts from `collect_facts`, by rank


@dataclass(frozen=True)
class Check:
    """One result in the report. Unless the status is OK, `remedy` is not empty."""

    name: str
    status: Literal["OK", "WARN", "FAIL"]
    finding: str
    remedy: str = ""

    def __post_init__(self) -> None:
        assert self.status == "OK" or self.remedy, self.name


def machine_checks(facts: Facts, cluster: ProcessGroup, found: Mapping[str, Any]) -> list[Check]:
    """Check the facts collected from all processes, and the clocks of their hosts.

    Every process must call this. `found` is the result of `initialize_jax`.
    """
    return [
        check_versions(facts),
        check_launcher(facts, cluster),
        check_hosts(facts),
        check_devices(facts),
        check_accelerators(facts, cluster.machine),
        *check_resources(facts),
        check_interface(facts, cluster, found),
        check_clocks(cluster),
    ]


def check_versions(facts: Facts) -> Check:
    """Check that all processes run the same versions of Python, MPI and the packages."""
    versions = facts[0].versions
    for name in versions:
        values = [f.versions[name] or "none" for f in facts]
        if len(set(values)) > 1:
            remedy = "use one environment and one MPI module on all hosts"
            return Check("versions", "FAIL", f"{name} differs: {_by_value(values, facts)}", remedy)
    listed = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    return Check("versions", "OK", listed)


def check_launcher(facts: Facts, cluster: ProcessGroup) -> Check:
    """Check that MPI works if it is needed, and that no host of the job is left unused.

    This compares only the number of hosts, not their names. If the host file or node list
    is unreadable or invalid, the result is WARN.
    """
    n_hosts, allocated = len(set(cluster.hosts)), facts[0].allocated_hosts
    machine = f" on {cluster.machine.name}" if cluster.machine else ""
    finding = f"{cluster.launcher}{machine}, {count(cluster.size, 'process', 'es')}"
    remedy = ""
    if cluster.notes:
        finding = "; ".join([finding, *cluster.notes])
        remedy = "build mpi4py for this machine's MPI: pip install --no-binary mpi4py mpi4py"
    elif isinstance(allocated, str):
        finding += f"; {allocated}"
        remedy = "unset the variable if it is left over from another job"
    elif allocated > n_hosts:
        finding += f" on {n_hosts} of the {allocated} hosts allocated to this job"
        remedy = "start with mpiexec or srun; python -m jaxgpt.launch --print shows the command"
    return _warn_if(remedy, "launcher", finding, remedy)


def check_interface(facts: Facts, cluster: ProcessGroup, found: Mapping[str, Any]) -> Check:
    """Check that the hosts of a known machine communicate over its high-speed network.

    Only the coordinator's name is checked, and only if the machine has a `high_speed_suffix`.
    `found` is the result of `initialize_jax`.
    """
    if found["coordinator"] is None:
        return Check("interface", "OK", "not needed for a single process")
    # Skip the host of process 0 (f.host is 0), which may have to use loopback to reach itself.
    others = [f"{f.address} ({f.host_name})" for f in facts if f.host] or [facts[0].address]
    finding = f"coordinator {found['coordinator']}, reached from {_shorten(others)}"
    finding += "".join(f"; {n}" for n in found["notes"] if n.startswith("cleared"))  # proxies
    suffix = cluster.machine.high_speed_suffix if cluster.machine else None
    slow = suffix and len(set(cluster.hosts)) > 1 and suffix not in found["coordinator"]
    if slow:
        finding += f"; this is not {cluster.machine.name}'s high-speed network"
    remedy = f"unset JAXGPT_COORDINATOR, or give it a host name that ends in {suffix}"
    return _warn_if(slow, "interface", finding, remedy)


def check_hosts(facts: Facts) -> Check:
    """Check that all hosts run the same number of processes."""
    sizes = Counter(f.host for f in facts)
    names = _shorten([f.host_name for f in facts])
    if len(set(sizes.values())) > 1:
        uneven = _by_value([str(sizes[f.host]) for f in facts], facts)
        remedy = "give the launcher a number of processes per host (-ppn, --ntasks-per-node)"
        return Check("hosts", "WARN", f"hosts run different numbers of processes: {uneven}", remedy)
    each = f"{count(sizes[facts[0].host], 'process', 'es')} on {'each' if len(sizes) > 1 else 'it'}"
    return Check("hosts", "OK", f"{count(len(sizes), 'host')} ({names}), {each}")


def check_devices(facts: Facts) -> Check:
    """Check that all processes have the same number and kind of devices.

    Only the kind of each process's first device is compared.
    """
    devices = [f"{len(f.devices)} x {f.device_kind}" for f in facts]
    if len(set(devices)) > 1:
        remedy = "give every process the same number of devices, of one kind (CUDA_VISIBLE_DEVICES)"
        finding = f"processes have different devices: {_by_value(devices, facts)}"
        return Check("devices", "FAIL", finding, remedy)
    finding = f"{devices[0]} in each process, {sum(len(f.devices) for f in facts)} in all"
    if facts[0].device_memory:
        finding += f", JAX may use {format_bytes(facts[0].device_memory)} on each"
    return Check("devices", "OK", finding)


def check_accelerators(facts: Facts, machine: Machine | None) -> Check:
    """Check that every accelerator of every host is used by JAX, in exactly one process.

    The result is FAIL if process 0 uses the CPU and a host has accelerators, unless
    JAX_PLATFORMS=cpu is set. It is WARN if processes share a device or leave devices unused. A host
    of a known machine is assumed to have `devices_per_host` accelerators. On an unknown machine,
    the number comes from `count_accelerators`, and JAX may leave some accelerators unused if a
    variable such as CUDA_VISIBLE_DEVICES is set.
    """
    on_cpu = facts[0].platform == "cpu"
    for here in _by_host(facts):
        host = here[0].host_name
        there = machine.devices_per_host if machine else here[0].accelerators
        used = Counter(device for f in here for device in f.devices)
        shared = [device for device, n in used.items() if n > 1]
        narrowed = machine is None and any(f.narrowed for f in here)
        if on_cpu and there and here[0].jax_platforms != "cpu":
            finding = f"{host} has {count(there, 'accelerator')} but JAX uses the CPU"
            remedy = PLUGIN_REMEDIES[machine.device] if machine else PLUGIN_REMEDY
            return Check("accelerators", "FAIL", finding, remedy)
        if not on_cpu and shared:
            finding = f"processes on {host} seem to share device {_shorten(shared)}"
            remedy = "start one process per device, each with its own CUDA_VISIBLE_DEVICES"
            return Check("accelerators", "WARN", finding, remedy)
        if not on_cpu and len(used) < there and not narrowed:
            finding = f"{len(used)} of the {there} devices of {host} are in use"
            remedy = "start one process per device, or one process per host that uses all devices"
            return Check("accelerators", "WARN", finding, remedy)
    finding = "every accelerator visible to the processes is in use"
    if on_cpu:
        kept_off = any(f.accelerators for f in facts)
        finding = "not used, because JAX_PLATFORMS=cpu" if kept_off else "the hosts have none"
    return Check("accelerators", "OK", finding)


def check_resources(facts: Facts) -> list[Check]:
    """Check that every process has enough memory, cores and shared memory; return three checks.

    A process needs `MEMORY_PER_PROCESS` bytes of memory and `SHARED_MEMORY_PER_PROCESS` bytes of
    shared memory. The processes of a host also need one core each, or all cores if the host has
    fewer cores than processes.
    """
    n = Counter(f.host for f in facts)
    cores = {here[0].host: len({c for f in here for c in f.cores}) for here in _by_host(facts)}
    f = min(facts, key=lambda f: f.memory / n[f.host])
    memory = _warn_if(
        f.memory / n[f.host] < MEMORY_PER_PROCESS,
        "memory",
        f"{f.memory / n[f.host] / GIB:.1f} GiB of host memory for each process on {f.host_name}",
        "request more memory (all of it in Slurm: --mem=0), or start fewer processes per host",
    )
    f = min(facts, key=lambda f: cores[f.host] / min(n[f.host], f.host_cores))
    bound = _warn_if(
        cores[f.host] < min(n[f.host], f.host_cores),
        "cores",
        f"{count(n[f.host], 'process', 'es')} may run on {cores[f.host]} of "
        f"{count(f.host_cores, 'core')} on {f.host_name}",
        "bind each process to its own cores (mpiexec --cpu-bind depth -d N, srun -c N)",
    )
    f = min(facts, key=lambda f: f.shared_memory / n[f.host])
    shared = _warn_if(
        f.shared_memory / n[f.host] < SHARED_MEMORY_PER_PROCESS,
        "shared memory",
        f"{format_bytes(f.shared_memory)} are free in {SHARED_MEMORY} on {f.host_name}",
        "remove files that earlier jobs left there; if this is a container, start it with "
        "--shm-size=8g",
    )
    return [memory, bound, shared]


def check_clocks(cluster: ProcessGroup, clock: Callable[[], float] = time.time) -> Check:
    """Check that the clocks of all hosts differ by at most `CLOCK_TOLERANCE` seconds.

    On a single host, nothing is compared. `clock` returns the time in seconds. Every process must
    call this.
    """
    if len(set(cluster.hosts)) == 1:
        return Check("clocks", "OK", "not needed on a single host")
    rounds = []
    for _ in range(CLOCK_ROUNDS):
        cluster.barrier()
        rounds.append(cluster.allgather(clock()))
    ahead = np.median([np.array(times) - times[0] for times in rounds], axis=0)
    fast, slow = np.argmax(ahead), np.argmin(ahead)
    skew, names = ahead[fast] - ahead[slow], cluster.host_names
    finding = f"{names[fast]} is {skew:.3f} s ahead of {names[slow]}"
    remedy = "synchronize the hosts with a time server (chronyc tracking shows their status)"
    return _warn_if(skew > CLOCK_TOLERANCE, "clocks", finding, remedy)


def _warn_if(wrong: Any, name: str, finding: str, remedy: str) -> Check:
    return Check(name, "WARN", finding, remedy) if wrong else Check(name, "OK", finding)


def _by_host(facts: Facts) -> list[Facts]:
    return [[f for f in facts if f.host == host] for host in dict.fromkeys(f.host for f in facts)]


def _by_value(values: Sequence[str], facts: Facts) -> str:
    """Return each value and its hosts as text: `0.11.2 on node1, node2, 0.10.2 on node5`."""
    owners: dict[str, list[str]] = defaultdict(list)
    for value, f in zip(values, facts, strict=True):
        owners[value].append(f.host_name)
    most_first = sorted(owners.items(), key=lambda item: -len(item[1]))
    return ", ".join(f"{value} on {_shorten(names)}" for value, names in most_first)


def _shorten(names: Sequence[str]) -> str:
    """Return the first four distinct names and the number of other names, as text."""
    names = list(dict.fromkeys(names))
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
