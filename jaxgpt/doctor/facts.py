"""Facts about a process, its host and its devices, for the checks in `checks.py`."""

import os
import platform
import shutil
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from jaxgpt.cluster.hardware import (
    count_accelerators,
    own_cpus,
    usable_device_files,
    visible_devices,
)
from jaxgpt.cluster.hosts import address_towards, job_hosts
from jaxgpt.cluster.process_group import ProcessGroup, catch_usage_error
from jaxgpt.runtime.devices import local_device_ids

PACKAGES = (
    "jaxgpt", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "mpi4py", "numpy",
)  # fmt: skip
# MPI and NCCL keep their buffers in /dev/shm (on macOS, in temporary files).
SHARED_MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
# Maps a cgroup controller ("" in version 2) to its root directory and the file with the limit.
MEMORY_LIMITS = {
    "": (Path("/sys/fs/cgroup"), "memory.max"),
    "memory": (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
}


def _package_versions() -> dict[str, str | None]:
    """Return a dict from each package in `PACKAGES` to its version, or None if not installed."""
    found = {name: d.version for d in metadata.distributions() if (name := d.name) in PACKAGES}
    return {package: found.get(package) for package in PACKAGES}


def collect_facts(cluster: ProcessGroup, coordinator: str | None) -> dict[str, Any]:
    """Return JSON-serializable facts about this process.

    Every process must call this, after JAX has started. `coordinator` is the entry of that name in
    the result of `initialize_jax`. Comments below explain the keys. Raises `OSError` if the
    coordinator's name does not resolve, if there is no route to it, or if the memory limits or the
    free shared memory cannot be read.
    """
    import jax

    local = jax.local_devices()
    _, visible = visible_devices(os.environ) or ("", [])
    hosts, error = catch_usage_error(job_hosts, os.environ)
    return {
        "host": cluster.hosts[cluster.rank],  # rank of the first process on this host
        "host_name": cluster.host_names[cluster.rank],
        # The number of hosts allocated to the job, or an error message if the number is unknown.
        "allocated_hosts": error or len(hosts[0]),
        "versions": {
            "python": platform.python_version(),
            "MPI": cluster.mpi_library and " ".join(cluster.mpi_library.split()),
            **_package_versions(),
        },
        # This host's address on the route to the coordinator.
        "address": coordinator and address_towards(coordinator.rpartition(":")[0].strip("[]")),
        "platform": local[0].platform,  # cpu, gpu, tpu ...
        "device_kind": local[0].device_kind,
        # For GPUs, names that are unique on the host.
        "devices": device_names(local_device_ids(cluster) or range(len(local)), visible),
        "narrowed": bool(visible),  # an environment variable selects the visible devices
        "jax_platforms": os.environ.get("JAX_PLATFORMS", ""),
        "accelerators": count_accelerators(),  # number of accelerators on the host
        # Bytes that JAX may use on one device; None if the device does not report this limit.
        "device_memory": (local[0].memory_stats() or {}).get("bytes_limit"),
        # Available host memory in bytes (on macOS, all memory), or the job's limit if it is lower.
        "memory": min([_available_memory(), *_memory_limits()]),
        "shared_memory": shutil.disk_usage(SHARED_MEMORY).free,  # bytes
        "cores": list(own_cpus()),  # CPUs that this process may run on
        "host_cores": os.cpu_count() or 1,
    }


def device_names(numbers: Sequence[int], visible: Sequence[str]) -> list[str]:
    """Return a name for each of this process's devices.

    Different GPUs of a host should get different names. `visible` holds the devices that a variable
    such as CUDA_VISIBLE_DEVICES selects, if any. `numbers` holds each device's index among the
    visible devices. Processes may use the same index for different devices, because `visible` or a
    cgroup may select the devices that a process sees.
    """
    seen = dict(enumerate(visible))
    usable = " ".join(usable_device_files())
    return [f"{seen.get(n, n)} of {usable or 'the host'}" for n in numbers]


def _available_memory() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # macOS
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def _memory_limits() -> list[int]:
    """Return the memory limits, in bytes, of this process's cgroup and all parent cgroups."""
    cgroups = Path("/proc/self/cgroup")
    files = []
    for line in cgroups.read_text().splitlines() if cgroups.exists() else []:
        _, controllers, group = line.split(":", 2)
        root, name = MEMORY_LIMITS.get(controllers, MEMORY_LIMITS[""])
        files += [
            root / place.lstrip("/") / name for place in (group, *map(str, Path(group).parents))
        ]
    texts = [file.read_text().strip() for file in files if file.is_file()]
    return [int(text) for text in texts if text != "max"]
