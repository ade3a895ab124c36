"""Facts about a process, its host and its devices, collected without judging them."""

import fcntl
import glob
import os
import platform
import resource
import socket
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from jaxgpt.cluster.hardware import (
    DEVICE_FILES,
    VISIBLE_VARIABLES,
    count_accelerators,
    own_cpus,
)
from jaxgpt.cluster.process_group import ProcessGroup
from jaxgpt.runtime.devices import local_device_ids

PACKAGES = (
    "jaxgpt", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "mpi4py", "numpy",
)  # fmt: skip
# Where Linux says how much memory a process may have: control groups, version 2 and 1.
_MEMORY_LIMITS = {"": ("", "memory.max"), "memory": ("memory", "memory.limit_in_bytes")}
_SIOCGIFADDR = 0x8915  # ioctl of an interface's IPv4 address (netdevice(7))


@dataclass(frozen=True)
class Facts:
    """One process; JSON can hold all of it."""

    rank: int
    host: int
    """Rank of the first process on this one's host."""
    host_name: str
    versions: Mapping[str, str | None]
    """By package, and of Python; None for a package that is not installed."""
    mpi_library: str | None
    platform: str
    """JAX's name of the back end: cpu, gpu, tpu ..."""
    device_kind: str
    devices: tuple[str, ...]
    """This process's devices, each by a name that no other device of the host has."""
    visible: str | None
    """The variable that narrows what the process sees, `NAME=value`."""
    jax_platforms: str
    """JAX_PLATFORMS; empty if it is not set."""
    accelerators: int
    """How many the host has, by their device files."""
    nvidia: bool
    """True if they are NVIDIA's."""
    device_memory: int | None
    """Bytes that JAX may use on one device; None where it does not say."""
    memory: int
    """Bytes of the host that are free, or all that the job is allowed if that is less."""
    shared_memory: int | None
    """Free bytes in /dev/shm; None where there is none."""
    cores: tuple[int, ...]
    """Processors that this process may run on."""
    host_cores: int
    """Processors of the host."""
    open_files: int
    """How many files this process may have open."""


def collect_facts(cluster: ProcessGroup) -> Facts:
    """Return the facts of this process; all processes have to call it. JAX has been started."""
    import jax

    local = jax.local_devices()
    visible = next((v for v in VISIBLE_VARIABLES if os.environ.get(v)), None)
    return Facts(
        rank=cluster.rank,
        host=cluster.hosts[cluster.rank],
        host_name=cluster.host_names[cluster.rank],
        versions={"python": platform.python_version(), **{p: _version(p) for p in PACKAGES}},
        mpi_library=cluster.mpi_library,
        platform=local[0].platform,
        device_kind=local[0].device_kind,
        devices=tuple(
            device_names(len(local), local_device_ids(cluster), os.environ.get(visible or ""))
        ),
        visible=visible and f"{visible}={os.environ[visible]}",
        jax_platforms=os.environ.get("JAX_PLATFORMS", ""),
        accelerators=count_accelerators(),
        nvidia=bool(glob.glob("/dev/nvidia[0-9]*")),
        device_memory=(local[0].memory_stats() or {}).get("bytes_limit"),
        memory=min([_available_memory(), *_memory_limits(Path("/proc/self/cgroup"))]),
        shared_memory=_free_bytes("/dev/shm"),
        cores=own_cpus(),
        host_cores=os.cpu_count() or 1,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    )


def from_json(values: Mapping[str, Any]) -> Facts:
    """Return Facts from the dict that `dataclasses.asdict` and JSON made of them."""
    return Facts(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})


def addresses_of(host: str) -> list[str]:
    """Return the addresses that this host finds for a name."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [str(entry[4][0]) for entry in found]


def interface_of(addresses: Iterable[str]) -> str | None:
    """Return the interface of this host that has one of some IPv4 addresses, if one has."""
    wanted = set(addresses)
    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            try:
                reply = fcntl.ioctl(s, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # an interface without an IPv4 address
                continue
        if socket.inet_ntoa(reply[20:24]) in wanted:
            return name
    return None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def device_names(n_devices: int, chosen: list[int] | None, visible: str | None) -> list[str]:
    """Return names that tell this process's devices from those of other processes of the host.

    A name is the device's place among those that the process sees, after a variable has chosen
    among them, and the device files that it may use: a scheduler's control group may give each
    process another one as its first.

    Args:
        chosen: returned by `local_device_ids`.
        visible: the value of the variable that narrows what is seen.
    """
    seen = visible.split(",") if visible else []
    files = [f for pattern in DEVICE_FILES for f in glob.glob(pattern)]
    usable = sorted(os.path.basename(f) for f in files if os.access(f, os.R_OK | os.W_OK))
    numbers = chosen or range(n_devices)
    return [
        f"{seen[n].strip() if n < len(seen) else n} of {' '.join(usable) or 'the host'}"
        for n in numbers
    ]


def _available_memory() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # macOS
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def _memory_limits(cgroups: Path) -> list[int]:
    """Return the limits of the job's control group and those around it, in bytes."""
    limits = []
    for line in cgroups.read_text().splitlines() if cgroups.exists() else []:
        _, controllers, path = line.split(":", 2)
        if controllers not in _MEMORY_LIMITS:
            continue
        folder, file = _MEMORY_LIMITS[controllers]
        group = Path("/sys/fs/cgroup") / folder / path.lstrip("/")
        for directory in (group, *group.parents):
            text = (directory / file).read_text() if (directory / file).exists() else "max"
            limits += [int(text)] if text.strip() != "max" else []
    return limits


def _free_bytes(path: str) -> int | None:
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize
