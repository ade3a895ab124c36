"""Number of simulated CPU devices, and each process's share of its host's accelerators."""

import math
import os
import platform

from jaxgpt.cluster.hardware import (
    accelerator_expected,
    count_accelerators,
    usable_device_files,
    visible_devices,
)
from jaxgpt.cluster.monitor import process_names
from jaxgpt.cluster.process_group import ProcessGroup
from jaxgpt.config import MeshShape, UsageError, devices_per_process

MAX_CPU_DEVICES = 2048  # XLA's limit per process


def cpu_devices_per_process(shape: MeshShape, cluster: ProcessGroup) -> int:
    """Return the number of devices that each process of a CPU job simulates.

    If JAX_NUM_CPU_DEVICES is set, return its value, even if it does not fit the mesh. By default,
    the processes share the devices of the mesh equally. If the mesh contains -1, each process
    simulates the smallest number of devices that makes the total a multiple of the product of the
    other axis sizes.

    Raises `UsageError` if JAX_NUM_CPU_DEVICES is invalid, or if a process would need more than
    `MAX_CPU_DEVICES` devices.
    """
    wanted = os.environ.get("JAX_NUM_CPU_DEVICES")
    if wanted is not None:
        if not wanted.isdecimal() or not 1 <= int(wanted) <= MAX_CPU_DEVICES:
            raise UsageError(
                f"JAX_NUM_CPU_DEVICES={wanted}: must be a whole number from 1 to {MAX_CPU_DEVICES}"
            )
        return int(wanted)
    known = shape.n_devices
    least = math.lcm(known, cluster.size) // cluster.size
    needed = known / cluster.size if shape.is_filled else least
    if needed > MAX_CPU_DEVICES:
        raise UsageError(
            f"parallel.mesh={shape}: its {known} devices are too many; on CPUs, a process can "
            f"simulate {MAX_CPU_DEVICES}; set a smaller mesh or start more processes"
        )
    if not shape.is_filled:  # the axis of size -1 absorbs the surplus devices
        return least
    return devices_per_process(shape, cluster.size)


def agree_on_accelerators(cluster: ProcessGroup) -> bool:
    """Return whether accelerators are expected, which must be the same on all processes.

    All processes must call this. Raises `UsageError` on all processes if the answers differ, for
    example because the accelerators of one host have failed.
    """
    answers = cluster.allgather(accelerator_expected())
    if len(set(answers)) > 1:
        without = [rank for rank, expects in enumerate(answers) if not expects]
        raise UsageError(
            f"no accelerators are visible to {process_names(without, cluster.host_names)}, but "
            "other processes see some; check the devices of these hosts and variables such as "
            "CUDA_VISIBLE_DEVICES there, exclude the hosts, or set JAX_PLATFORMS=cpu for all"
        )
    return answers[0]


def local_device_ids(cluster: ProcessGroup) -> list[int] | None:
    """Return the indices of this process's share of the visible accelerators, or None to use all.

    Processes on one host that see the same accelerators get equal shares, and any remainder is
    unused. The result is None if the process runs on CPUs, if it sees at most one accelerator, or
    if no other process on the host sees the same accelerators. If the result is not None and the
    machine is in `MACHINES` and has Intel GPUs, this also sets ZE_AFFINITY_MASK.

    All processes must call this. Raises `UsageError` on all processes if the processes on a host
    outnumber the accelerators that they share, unless they run on CPUs or see at most one
    accelerator.
    """
    machine = cluster.machine
    seen, n_sharing, position = _visible_accelerators(cluster)
    # Do not divide a single visible device, because a device file may represent several devices.
    shares = n_sharing > 1 and len(seen) > 1 and accelerator_expected()
    each = len(seen) // n_sharing
    cluster.raise_if_any(
        f"processes on host {platform.node()}={n_sharing}: more than its {len(seen)} devices; "
        "start at most one process per device"
        if shares and not each
        else None
    )
    if not shares:
        return None
    chosen = list(range(position * each, (position + 1) * each))
    if machine and machine.device == "pvc":  # JAX's setting supports only CUDA and ROCm
        os.environ["ZE_AFFINITY_MASK"] = ",".join(seen[i] for i in chosen)
    return chosen


def _visible_accelerators(cluster: ProcessGroup) -> tuple[list[str], int, int]:
    """Return this process's visible accelerators, and the number of processes that share them.

    The third value is this process's index among those processes. All processes must call this.
    """
    _, visible = visible_devices(os.environ) or ("", [])
    # In a Slurm task with its own cgroup, device 0 is the first device that the task may use.
    mine = [visible, usable_device_files()]
    everyone = zip(cluster.allgather(mine), cluster.hosts, strict=True)
    on_host = [theirs for theirs, host in everyone if host == cluster.hosts[cluster.rank]]
    # An Intel GPU has one device file for several tiles, so use the machine's number of devices.
    n_seen = count_accelerators(only_usable=True)
    n_seen = n_seen or (cluster.machine.devices_per_host if cluster.machine else 0)
    seen = visible or [str(i) for i in range(n_seen)]
    return seen, on_host.count(mine), on_host[: cluster.local_rank].count(mine)


def count_devices(shape: MeshShape, cluster: ProcessGroup) -> int:
    """Estimate the number of devices that the mesh will have once JAX starts.

    The estimate is the product of the axis sizes, even if the job has a different number of
    devices. If the mesh contains -1, the estimate is the total number of devices of all processes.
    A process that sees at most one accelerator counts as one device, even if JAX finds more. All
    processes must call this.
    """
    if shape.is_filled:
        return shape.n_devices
    if not agree_on_accelerators(cluster):
        return cpu_devices_per_process(shape, cluster) * cluster.size
    seen, n_sharing, _ = _visible_accelerators(cluster)
    own = len(seen) // n_sharing if len(seen) > 1 else 1
    return sum(cluster.allgather(own))
