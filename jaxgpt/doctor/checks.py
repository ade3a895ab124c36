"""What is right or wrong with the processes, hosts and devices of a job, and what to do about it.

Each function judges the facts of all processes, which `facts.look` found.
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

GIB = 2**30
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


Everyone = Sequence[Facts]


def machine_checks(
    everyone: Everyone,
    cluster: ProcessGroup,
    found: Mapping[str, Any],
    allocated: int | str,
    interface: str | None,
) -> list[Check]:
    """The checks of this file, in the order of the report.

    Args:
        found: what `initialize_jax` returned.
        allocated: hosts that the scheduler gave to the job, or why that cannot be told.
        interface: which of process 0's interfaces has the coordinator's address.
    """
    return [
        check_versions(everyone),
        check_supported(everyone[0].versions),
        check_launcher(cluster, allocated),
        check_mpi(everyone),
        check_hosts(everyone),
        check_devices(everyone),
        check_accelerators(everyone, cluster.machine),
        check_memory(everyone),
        check_cores(everyone),
        check_interface(everyone, found, interface, cluster.machine),
        check_open_files(everyone),
        check_shared_memory(everyone),
    ]


def check_versions(everyone: Everyone) -> Check:
    """Whether all processes run the same versions."""
    versions = everyone[0].versions
    listed = ", ".join(f"{name} {v}" for name, v in versions.items() if v)
    for name in versions:
        seen = _by_value((f.versions[name] or "missing", f) for f in everyone)
        if len(seen) > 1:
            return Check(
                "versions", "FAIL", f"{name} differs: {_spread(seen)}",
                "start every process from one environment that all hosts see",
            )  # fmt: skip
    return Check("versions", "OK", listed + (" everywhere" if len(everyone) > 1 else ""))


def check_supported(
    versions: Mapping[str, str | None],
    requires: Callable[[str], list[str] | None] = metadata.requires,
) -> Check:
    """Whether versions are inside the ranges that jaxgpt, and JAX for jaxlib, declare."""
    wrong = []
    for owner in ("jaxgpt", "jax"):
        if versions[owner] is None:  # run from its folder without being installed
            continue
        for requirement in requires(owner) or []:
            name, bounds, marker = re.fullmatch(
                r"([\w.-]+)(?:\[.*?\])?\s*([^;]*)(;.*)?", requirement
            ).groups()
            if marker or name not in versions:  # an extra, or a package that we don't look at
                continue
            version = versions[name]
            if version is None or not _inside(version, bounds):
                wrong.append(f"{owner} needs {name}{bounds}, there is {version or 'none'}")
    if wrong:
        return Check(
            "supported versions", "FAIL", "; ".join(wrong),
            "pip install -c launch/pins.txt -e . in jaxgpt's folder installs tested versions",
        )  # fmt: skip
    return Check("supported versions", "OK", "inside the ranges that jaxgpt and JAX declare")


def check_launcher(cluster: ProcessGroup, allocated: int | str) -> Check:
    """Whether a launcher was seen, worked, and is used where the scheduler gave many hosts.

    Args:
        allocated: hosts that the scheduler gave to the job, or why that cannot be told.
    """
    machine = f" on {cluster.machine.name}" if cluster.machine else ""
    launcher = cluster.launcher.replace(f"; {cluster.mpi_library}", "")  # has its own line
    finding = f"{launcher}{machine}, {_count(cluster.size, 'process', 'es')}"
    if cluster.notes:
        return Check(
            "launcher", "WARN", f"{finding}; {'; '.join(cluster.notes)}",
            "build mpi4py for this machine's MPI: pip install --no-binary mpi4py mpi4py",
        )  # fmt: skip
    if isinstance(allocated, str):
        return Check(
            "launcher", "WARN", f"{finding}; {allocated}",
            "unset the variable where it is left over from another job",
        )  # fmt: skip
    n_hosts = len(set(cluster.hosts))
    if allocated > n_hosts:
        return Check(
            "launcher", "WARN",
            f"{finding} on {n_hosts} of the {allocated} hosts that this job was given",
            "start through mpiexec or srun; python -m jaxgpt.launch --print shows the line",
        )  # fmt: skip
    return Check("launcher", "OK", finding)


def check_mpi(everyone: Everyone) -> Check:
    """Whether all processes use one MPI library."""
    seen = _by_value((f.mpi_library or "none", f) for f in everyone)
    if len(seen) > 1:
        return Check(
            "MPI library", "FAIL", f"differs: {_spread(seen)}",
            "load the same MPI module, or the same environment, on every host",
        )  # fmt: skip
    library = " ".join((everyone[0].mpi_library or "").split())
    return Check("MPI library", "OK", library or "not used: no MPI launcher was seen")


def check_hosts(everyone: Everyone) -> Check:
    """Whether all hosts have as many processes."""
    counts = Counter(f.host for f in everyone)
    names = {f.host: f.host_name for f in everyone}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{names[h]} {n}" for h, n in counts.items())
        return Check(
            "hosts", "WARN", f"processes are spread unevenly: {listed}",
            "give the launcher a number of processes per host (-ppn, --ntasks-per-node)",
        )  # fmt: skip
    each = next(iter(counts.values()))
    listed = _few([names[h] for h in counts])
    return Check(
        "hosts", "OK", f"{_count(len(counts), 'host')} ({listed}), {_count(each, 'process', 'es')} "
        f"on {'each' if len(counts) > 1 else 'it'}",
    )  # fmt: skip


def check_devices(everyone: Everyone) -> Check:
    """Whether all processes have as many devices, of one kind, that no other process has."""
    kinds = _by_value((f"{len(f.devices)} x {f.device_kind}", f) for f in everyone)
    if len(kinds) > 1:
        return Check(
            "devices", "FAIL", f"processes have different devices: {_spread(kinds)}",
            "give every process the same number of devices of one kind; look at the hosts with "
            "fewer, and at CUDA_VISIBLE_DEVICES there",
        )  # fmt: skip
    owners: dict[tuple[int, str], list[Facts]] = defaultdict(list)
    if everyone[0].platform != "cpu":
        for facts in everyone:
            for device in facts.devices:
                owners[facts.host, device].append(facts)
    for (_, device), shared in owners.items():
        if len(shared) > 1:
            ranks = _few([str(f.rank) for f in shared])
            return Check(
                "devices", "WARN",
                f"processes {ranks} on {shared[0].host_name} seem to share device {device}",
                "start at most one process per device, and let CUDA_VISIBLE_DEVICES, where it is "
                "set, name another one for each",
            )  # fmt: skip
    kind, total = next(iter(kinds)), sum(len(f.devices) for f in everyone)
    memory = everyone[0].device_memory
    room = f", {memory / GIB:.0f} GiB for JAX on each" if memory else ""
    of_each = f" in each process, {total} in all" if len(everyone) > 1 else ""
    return Check("devices", "OK", f"{kind}{of_each}{room}")


def check_accelerators(everyone: Everyone, machine: Machine | None) -> Check:
    """Whether JAX uses the accelerators that the hosts have."""
    for facts in everyone:
        there = machine.devices_per_host if machine else facts.accelerators
        if there and facts.platform == "cpu" and facts.jax_platforms != "cpu":
            plugin = "the JAX plugin of this machine's vendor"
            install = "pip install 'jaxgpt[cuda]'" if facts.nvidia else f"install {plugin}"
            return Check(
                "accelerators", "FAIL",
                f"{facts.host_name} has {_count(there, 'accelerator')} but JAX uses the CPU",
                f"{install} and check the driver; or set JAX_PLATFORMS=cpu to train on CPUs",
            )  # fmt: skip
    idle = _idle(everyone, machine)
    if idle:
        return Check(
            "accelerators", "WARN", idle,
            "start as many processes per host as it has devices, or one for all of them",
        )  # fmt: skip
    if everyone[0].platform != "cpu":
        return Check("accelerators", "OK", "all that the processes may see are in use")
    kept_off = any(f.accelerators for f in everyone)
    reason = "JAX_PLATFORMS=cpu keeps JAX off them" if kept_off else "none on the hosts"
    return Check("accelerators", "OK", reason)


def _idle(everyone: Everyone, machine: Machine | None) -> str | None:
    """A sentence about a host with devices that no process uses."""
    for host in {f.host for f in everyone}:
        here = [f for f in everyone if f.host == host]
        used = len({device for f in here for device in f.devices})
        there = machine.devices_per_host if machine else here[0].accelerators
        narrowed = any(f.visible for f in here) and machine is None
        if here[0].platform != "cpu" and used < there and not narrowed:
            return f"{used} of the {there} devices of {here[0].host_name} are in use"
    return None


def check_memory(everyone: Everyone) -> Check:
    """Whether the hosts have room for their processes."""
    share, least = min(
        (f.memory / sum(f.host == other.host for other in everyone), f.host_name) for f in everyone
    )
    finding = f"{share / GIB:.1f} GiB of host memory for each process"
    if share < MEMORY_PER_PROCESS:
        return Check(
            "memory", "WARN", f"{finding} on {least}",
            "ask the scheduler for more memory (Slurm: --mem=0 is all of a host), or start fewer "
            "processes per host",
        )  # fmt: skip
    return Check("memory", "OK", finding)


def check_cores(everyone: Everyone) -> Check:
    """Whether processes are bound to few cores while others are idle."""
    for host in {f.host for f in everyone}:
        here = [f for f in everyone if f.host == host]
        cores = {core for f in here for core in f.cores}
        if len(cores) < min(len(here), here[0].host_cores):
            return Check(
                "cores", "WARN",
                f"{_count(len(here), 'process', 'es')} on {here[0].host_name} share "
                f"{_count(len(cores), 'core')} of {here[0].host_cores}",
                "have the launcher bind each process to cores of its own (mpiexec --cpu-bind "
                "depth -d N, srun --cpus-per-task=N)",
            )  # fmt: skip
    each = sorted({len(f.cores) for f in everyone})
    return Check(
        "cores", "OK",
        f"a process may run on {' to '.join(map(str, each[:: max(1, len(each) - 1)]))} of the "
        f"{everyone[0].host_cores} of its host",
    )  # fmt: skip


def check_interface(
    everyone: Everyone,
    found: Mapping[str, Any],
    interface: str | None,
    machine: Machine | None,
) -> Check:
    """Whether hosts meet over a network that they share, and over the fast one."""
    proxies = "".join(f"; {note}" for note in found["notes"] if note.startswith("cleared"))
    coordinator = found["coordinator"]
    if coordinator is None:
        return Check("interface", "OK", "not needed: a single process")
    finding = f"coordinator {coordinator} on {interface or 'an unknown interface'}{proxies}"
    if len({f.host for f in everyone}) == 1:
        return Check("interface", "OK", finding)
    if interface == "lo" or coordinator.startswith(("127.", "localhost", "[::1]")):
        return Check(
            "interface", "FAIL", f"{finding}, which other hosts cannot reach",
            "set JAXGPT_COORDINATOR=host:port to a name of process 0's host in the network",
        )  # fmt: skip
    if machine and machine.high_speed_suffix and machine.high_speed_suffix not in coordinator:
        return Check(
            "interface", "WARN", f"{finding}, not {machine.name}'s high-speed network",
            f"unset JAXGPT_COORDINATOR, or let it end in {machine.high_speed_suffix}",
        )  # fmt: skip
    return Check("interface", "OK", finding)


def check_open_files(everyone: Everyone) -> Check:
    """Whether process 0 can keep connections to all others, besides its files."""
    least = min(everyone, key=lambda f: f.open_files)
    needed = 256 + 2 * len(everyone)
    if 0 <= least.open_files < needed:  # -1 is no limit
        return Check(
            "open files", "WARN",
            f"a process on {least.host_name} may open {least.open_files}; this job can need "
            f"{needed}",
            f"ulimit -n {max(4096, needed)} in the job script",
        )  # fmt: skip
    return Check("open files", "OK", f"{least.open_files} per process")


def check_shared_memory(everyone: Everyone) -> Check:
    """Whether /dev/shm has room for what MPI and NCCL keep there."""
    for f in everyone:
        n = sum(f.host == other.host for other in everyone)
        if (
            f.shared_memory is not None
            and n > 1
            and f.shared_memory < n * SHARED_MEMORY_PER_PROCESS
        ):
            return Check(
                "shared memory", "WARN",
                f"{f.shared_memory / 2**20:.0f} MiB are free in /dev/shm of {f.host_name} for "
                f"{n} processes",
                "remove what earlier jobs left in /dev/shm; start a container with --shm-size=8g",
            )  # fmt: skip
    sizes = [f.shared_memory for f in everyone if f.shared_memory is not None]
    return Check(
        "shared memory", "OK",
        f"{min(sizes) / GIB:.1f} GiB free in /dev/shm" if sizes else "this system has no /dev/shm",
    )  # fmt: skip


def _inside(version: str, bounds: str) -> bool:
    """Whether a version lies in a range such as `>=0.10,<0.12`."""

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
    """Processes by what they have, the most frequent first."""
    out: dict[str, list[Facts]] = defaultdict(list)
    for value, facts in pairs:
        out[value].append(facts)
    return dict(sorted(out.items(), key=lambda item: -len(item[1])))


def _spread(by_value: Mapping[str, Sequence[Facts]]) -> str:
    """Who has what: `0.11.2 on node1 and 3 more, 0.10.2 on node5`."""
    return ", ".join(
        f"{value} on {_few(list(dict.fromkeys(f.host_name for f in facts)))}"
        for value, facts in by_value.items()
    )


def _few(names: Sequence[str]) -> str:
    """Some of many names."""
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more


def _count(n: int, noun: str, plural: str = "s") -> str:
    return f"{n} {noun}{plural if n != 1 else ''}"
