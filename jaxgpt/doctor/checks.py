"""Checks of the processes, hosts and devices of a job: what is wrong, and what to do about it.

Each function judges the facts of all processes, which `facts.collect_facts` found.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Literal

from jaxgpt.cluster.machines import Machine
from jaxgpt.cluster.process_group import ProcessGroup
from jaxgpt.doctor.facts import Facts
from jaxgpt.perf.units import GIB, count, format_bytes

MEMORY_PER_PROCESS = GIB  # JAX, Orbax and a small model take about half of it
SHARED_MEMORY_PER_PROCESS = 2**24  # MPI's and NCCL's buffers


@dataclass(frozen=True)
class Check:
    """One line of the report."""

    name: str
    status: Literal["OK", "WARN", "FAIL"]
    finding: str
    remedy: str = ""
    """What to do about it; empty if the status is OK."""

    def __post_init__(self) -> None:
        assert self.status == "OK" or self.remedy, self.name


def ok(name: str, finding: str) -> Check:
    return Check(name, "OK", finding)


def warn(name: str, finding: str, remedy: str) -> Check:
    return Check(name, "WARN", finding, remedy)


def fail(name: str, finding: str, remedy: str) -> Check:
    return Check(name, "FAIL", finding, remedy)


Job = Sequence[Facts]  # the facts of all processes, by rank


def machine_checks(
    job: Job,
    cluster: ProcessGroup,
    found: Mapping[str, Any],
    allocated: int | str,
    interface: str | None,
) -> list[Check]:
    """Return the checks of this file, in the order of the report.

    Args:
        found: returned by `initialize_jax`.
        allocated: hosts that the scheduler gave to the job, or why that cannot be told.
        interface: which of process 0's interfaces has the coordinator's address.
    """
    return [
        check_versions(job),
        check_supported(job[0].versions),
        check_launcher(cluster, allocated),
        check_mpi(job),
        check_hosts(job),
        check_devices(job),
        check_accelerators(job, cluster.machine),
        check_memory(job),
        check_cores(job),
        check_interface(job, found, interface, cluster.machine),
        check_open_files(job),
        check_shared_memory(job),
    ]


def check_versions(job: Job) -> Check:
    """Check that all processes run the same versions."""
    versions = job[0].versions
    for name in versions:
        owners = _by_value((f.versions[name] or "missing", f) for f in job)
        if len(owners) > 1:
            remedy = "start every process from one environment that all hosts see"
            return fail("versions", f"{name} differs: {_owners(owners)}", remedy)
    listed = ", ".join(f"{name} {v}" for name, v in versions.items() if v)
    return ok("versions", listed + (" everywhere" if len(job) > 1 else ""))


def check_supported(
    versions: Mapping[str, str | None],
    requires: Callable[[str], list[str] | None] = metadata.requires,
) -> Check:
    """Check that versions are inside the ranges that jaxgpt, and JAX for jaxlib, declare."""
    wrong = []
    for owner in ("jaxgpt", "jax"):
        if versions[owner] is None:  # run from its folder without being installed
            continue
        for requirement in requires(owner) or []:
            name, bounds, marker = re.fullmatch(
                r"([\w.-]+)(?:\[.*?\])?\s*([^;]*)(;.*)?", requirement
            ).groups()
            if marker or name not in versions:  # an extra, or a package that is not looked at
                continue
            version = versions[name]
            if version is None or not _is_inside(version, bounds):
                wrong.append(f"{owner} needs {name}{bounds}, there is {version or 'none'}")
    if wrong:
        remedy = "pip install -c launch/pins.txt -e . in jaxgpt's folder installs tested versions"
        return fail("supported versions", "; ".join(wrong), remedy)
    return ok("supported versions", "inside the ranges that jaxgpt and JAX declare")


def check_launcher(cluster: ProcessGroup, allocated: int | str) -> Check:
    """Check that a launcher was seen, worked, and is used where there are many hosts."""
    machine = f" on {cluster.machine.name}" if cluster.machine else ""
    launcher = cluster.launcher.replace(f"; {cluster.mpi_library}", "")  # has its own line
    finding = f"{launcher}{machine}, {count(cluster.size, 'process', 'es')}"
    if cluster.notes:
        remedy = "build mpi4py for this machine's MPI: pip install --no-binary mpi4py mpi4py"
        return warn("launcher", f"{finding}; {'; '.join(cluster.notes)}", remedy)
    if isinstance(allocated, str):
        remedy = "unset the variable where it is left over from another job"
        return warn("launcher", f"{finding}; {allocated}", remedy)
    n_hosts = len(set(cluster.hosts))
    if allocated > n_hosts:
        return warn(
            "launcher",
            f"{finding} on {n_hosts} of the {allocated} hosts that this job was given",
            "start through mpiexec or srun; python -m jaxgpt.launch --print shows the line",
        )
    return ok("launcher", finding)


def check_mpi(job: Job) -> Check:
    """Check that all processes use one MPI library."""
    owners = _by_value((f.mpi_library or "none", f) for f in job)
    if len(owners) > 1:
        remedy = "load the same MPI module, or the same environment, on every host"
        return fail("MPI library", f"differs: {_owners(owners)}", remedy)
    library = " ".join((job[0].mpi_library or "").split())
    return ok("MPI library", library or "not used: no MPI launcher was seen")


def check_hosts(job: Job) -> Check:
    """Check that all hosts have as many processes."""
    counts = Counter(f.host for f in job)
    names = {f.host: f.host_name for f in job}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{names[h]} {n}" for h, n in counts.items())
        remedy = "give the launcher a number of processes per host (-ppn, --ntasks-per-node)"
        return warn("hosts", f"processes are spread unevenly: {listed}", remedy)
    each = next(iter(counts.values()))
    return ok(
        "hosts",
        f"{count(len(counts), 'host')} ({_shorten([names[h] for h in counts])}), "
        f"{count(each, 'process', 'es')} on {'each' if len(counts) > 1 else 'it'}",
    )


def check_devices(job: Job) -> Check:
    """Check that all processes have as many devices, of one kind, that no other process has."""
    kinds = _by_value((f"{len(f.devices)} x {f.device_kind}", f) for f in job)
    if len(kinds) > 1:
        return fail(
            "devices",
            f"processes have different devices: {_owners(kinds)}",
            "give every process the same number of devices of one kind; look at the hosts with "
            "fewer, and at CUDA_VISIBLE_DEVICES there",
        )
    owners: dict[tuple[int, str], list[Facts]] = defaultdict(list)
    if job[0].platform != "cpu":
        for facts in job:
            for device in facts.devices:
                owners[facts.host, device].append(facts)
    for (_, device), shared in owners.items():
        if len(shared) > 1:
            ranks = _shorten([str(f.rank) for f in shared])
            return warn(
                "devices",
                f"processes {ranks} on {shared[0].host_name} seem to share device {device}",
                "start at most one process per device, and let CUDA_VISIBLE_DEVICES, where it is "
                "set, name another one for each",
            )
    kind, total = next(iter(kinds)), sum(len(f.devices) for f in job)
    memory = job[0].device_memory
    of_each = f" in each process, {total} in all" if len(job) > 1 else ""
    room = f", {format_bytes(memory)} for JAX on each" if memory else ""
    return ok("devices", f"{kind}{of_each}{room}")


def check_accelerators(job: Job, machine: Machine | None) -> Check:
    """Check that JAX uses the accelerators that the hosts have."""
    there = {f.rank: machine.devices_per_host if machine else f.accelerators for f in job}
    for f in job:
        if there[f.rank] and f.platform == "cpu" and f.jax_platforms != "cpu":
            plugin = "install the JAX plugin of this machine's vendor"
            plugin = "pip install 'jaxgpt[cuda]'" if f.nvidia else plugin
            return fail(
                "accelerators",
                f"{f.host_name} has {count(there[f.rank], 'accelerator')} but JAX uses the CPU",
                f"{plugin} and check the driver; or set JAX_PLATFORMS=cpu to train on CPUs",
            )
    for f in job:
        here = [other for other in job if other.host == f.host]
        used = len({device for other in here for device in other.devices})
        narrowed = any(other.visible for other in here) and machine is None
        if f.platform != "cpu" and used < there[f.rank] and not narrowed:
            return warn(
                "accelerators",
                f"{used} of the {there[f.rank]} devices of {f.host_name} are in use",
                "start as many processes per host as it has devices, or one for all of them",
            )
    if job[0].platform != "cpu":
        return ok("accelerators", "all that the processes may see are in use")
    kept_off = any(f.accelerators for f in job)
    reason = "JAX_PLATFORMS=cpu keeps JAX off them" if kept_off else "none on the hosts"
    return ok("accelerators", reason)


def check_memory(job: Job) -> Check:
    """Check that the hosts have room for their processes."""
    on_host = Counter(f.host for f in job)
    share, least = min((f.memory / on_host[f.host], f.host_name) for f in job)
    finding = f"{share / GIB:.1f} GiB of host memory for each process"
    if share < MEMORY_PER_PROCESS:
        return warn(
            "memory",
            f"{finding} on {least}",
            "ask the scheduler for more memory (Slurm: --mem=0 is all of a host), or start fewer "
            "processes per host",
        )
    return ok("memory", finding)


def check_cores(job: Job) -> Check:
    """Check that processes are not bound to few cores while others are idle."""
    for host in {f.host for f in job}:
        here = [f for f in job if f.host == host]
        cores = {core for f in here for core in f.cores}
        if len(cores) < min(len(here), here[0].host_cores):
            return warn(
                "cores",
                f"{count(len(here), 'process', 'es')} on {here[0].host_name} share "
                f"{count(len(cores), 'core')} of {here[0].host_cores}",
                "let the launcher bind each process to cores of its own (mpiexec --cpu-bind "
                "depth -d N, srun --cpus-per-task=N)",
            )
    least, most = (f(len(facts.cores) for facts in job) for f in (min, max))
    cores = f"{least}" if least == most else f"{least} to {most}"
    return ok("cores", f"a process may run on {cores} of the {job[0].host_cores} of its host")


def check_interface(
    job: Job, found: Mapping[str, Any], interface: str | None, machine: Machine | None
) -> Check:
    """Check that hosts meet over a network that they share, and over the fast one."""
    proxies = "".join(f"; {note}" for note in found["notes"] if note.startswith("cleared"))
    coordinator = found["coordinator"]
    if coordinator is None:
        return ok("interface", "not needed: a single process")
    finding = f"coordinator {coordinator} on {interface or 'an unknown interface'}{proxies}"
    if len({f.host for f in job}) == 1:
        return ok("interface", finding)
    if interface == "lo" or coordinator.startswith(("127.", "localhost", "[::1]")):
        return fail(
            "interface",
            f"{finding}, which other hosts cannot reach",
            "set JAXGPT_COORDINATOR=host:port to a name of process 0's host in the network",
        )
    suffix = machine.high_speed_suffix if machine else None
    if suffix and suffix not in coordinator:
        return warn(
            "interface",
            f"{finding}, not {machine.name}'s high-speed network",
            f"unset JAXGPT_COORDINATOR, or let it end in {suffix}",
        )
    return ok("interface", finding)


def check_open_files(job: Job) -> Check:
    """Check that process 0 can keep connections to all others, besides its files."""
    least = min(job, key=lambda f: f.open_files)
    needed = 256 + 2 * len(job)
    if 0 <= least.open_files < needed:  # -1 is no limit
        return warn(
            "open files",
            f"a process on {least.host_name} may open {least.open_files}; this job can need "
            f"{needed}",
            f"ulimit -n {max(4096, needed)} in the job script",
        )
    return ok("open files", f"{least.open_files} per process")


def check_shared_memory(job: Job) -> Check:
    """Check that /dev/shm has room for what MPI and NCCL keep there."""
    on_host = Counter(f.host for f in job)
    known = [f for f in job if f.shared_memory is not None]
    for f in known:
        n, free = on_host[f.host], format_bytes(f.shared_memory)
        if n > 1 and f.shared_memory < n * SHARED_MEMORY_PER_PROCESS:
            return warn(
                "shared memory",
                f"{free} are free in /dev/shm of {f.host_name} for {n} processes",
                "remove what earlier jobs left in /dev/shm; start a container with --shm-size=8g",
            )
    if not known:
        return ok("shared memory", "this system has no /dev/shm")
    free = format_bytes(min(f.shared_memory for f in known))
    return ok("shared memory", f"{free} free in /dev/shm")


def _is_inside(version: str, bounds: str) -> bool:
    """Return whether a version lies in a range such as `>=0.10,<0.12`."""

    def numbers(text: str) -> list[int]:
        return [int(part) for part in re.match(r"[\d.]*\d", text)[0].split(".")]

    v = numbers(version)
    compare = {
        ">=": lambda b: v >= b, "<=": lambda b: v <= b, "<": lambda b: v < b,
        ">": lambda b: v > b, "==": lambda b: v == b, "!=": lambda b: v != b,
    }  # fmt: skip
    found = re.findall(r"(>=|<=|==|!=|<|>)\s*([\d.]+)", bounds)
    return all(compare[operator](numbers(bound)) for operator, bound in found)


def _by_value(pairs: Iterable[tuple[str, Facts]]) -> dict[str, list[Facts]]:
    """Return processes by value, the most frequent value first."""
    out: dict[str, list[Facts]] = defaultdict(list)
    for value, facts in pairs:
        out[value].append(facts)
    return dict(sorted(out.items(), key=lambda item: -len(item[1])))


def _owners(by_value: Mapping[str, Sequence[Facts]]) -> str:
    """Return who has which value: `0.11.2 on node1 and 3 more, 0.10.2 on node5`."""
    return ", ".join(
        f"{value} on {_shorten(list(dict.fromkeys(f.host_name for f in facts)))}"
        for value, facts in by_value.items()
    )


def _shorten(names: Sequence[str]) -> str:
    """Return the first four of many names, and how many more there are."""
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more
