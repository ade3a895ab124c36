"""Facts about a process, its host and its devices, collected without judging them."""

import glob
import os
import platform
import shutil
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from jaxgpt.cluster.hardware import DEVICE_FILES, VISIBLE_VARIABLES, count_accelerators, own_cpus
from jaxgpt.cluster.hosts import address_towards, job_hosts
from jaxgpt.cluster.process_group import ProcessGroup, catch_usage_error
from jaxgpt.runtime.devices import local_device_ids

PACKAGES = (
    "jaxgpt", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "mpi4py", "numpy",
)  # fmt: skip
# Where MPI and NCCL keep their buffers; on macOS among other files.
SHARED_MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
# Controllers of a control group, version 2 and 1 -> where its memory's limit stands.
MEMORY_LIMITS = {
    "": (Path("/sys/fs/cgroup"), "memory.max"),
    "memory": (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
}


def package_versions() -> dict[str, str | None]:
    """Return the version of each package that matters here, None if it is not installed."""
    found = {name: d.version for d in metadata.distributions() if (name := d.name) in PACKAGES}
    return {package: found.get(package) for package in PACKAGES}


def collect_facts(cluster: ProcessGroup, coordinator: str | None) -> dict[str, Any]:
    """Return the facts of this process; all processes have to call it. JAX has been started."""
    import jax

    local = jax.local_devices()
    visible = next((os.environ[v] for v in VISIBLE_VARIABLES if os.environ.get(v)), "")
    hosts, error = catch_usage_error(job_hosts, os.environ)
    return {
        "host": cluster.hosts[cluster.rank],  # rank of the first process on this one's host
        "host_name": cluster.host_names[cluster.rank],
        # How many the scheduler gave to the job, or why that cannot be told.
        "allocated_hosts": error or len(hosts[0]),
        "versions": {
            "python": platform.python_version(),
            "MPI": cluster.mpi_library and " ".join(cluster.mpi_library.split()),
            **package_versions(),
        },
        # Its address as the coordinator sees it.
        "address": coordinator and address_towards(coordinator.rpartition(":")[0].strip("[]")),
        "platform": local[0].platform,  # cpu, gpu, tpu ...
        "device_kind": local[0].device_kind,
        # By names that no other device of the host has.
        "devices": device_names(local_device_ids(cluster) or range(len(local)), visible),
        "narrowed": bool(visible),  # a variable chooses among the host's devices
        "jax_platforms": os.environ.get("JAX_PLATFORMS", ""),
        "accelerators": count_accelerators(),  # of the host
        # Bytes that JAX may use on one device; None if it does not say.
        "device_memory": (local[0].memory_stats() or {}).get("bytes_limit"),
        # Bytes that are free on the host, or all that the job may have if that is less.
        "memory": min([_available_memory(), *_memory_limits()]),
        "shared_memory": shutil.disk_usage(SHARED_MEMORY).free,
        "cores": list(own_cpus()),  # that this process may run on
        "host_cores": os.cpu_count() or 1,
    }


def device_names(numbers: Sequence[int], visible: str) -> list[str]:
    """Return names that tell this process's devices from those of other processes of the host.

    A variable's value, `visible`, may choose what the process sees, and a control group which
    device files it may use: device 0 can be another one for each process.
    """
    seen = dict(enumerate(visible.split(","))) if visible else {}
    files = [f for pattern in DEVICE_FILES for f in glob.glob(pattern)]
    usable = " ".join(sorted(os.path.basename(f) for f in files if os.access(f, os.R_OK | os.W_OK)))
    return [f"{seen.get(n, n)} of {usable or 'the host'}" for n in numbers]


def _available_memory() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # macOS
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def _memory_limits() -> list[int]:
    """Return the limits of the job's control group and those around it, in bytes."""
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
