"""The CPUs of this process."""

import os


def own_cpus() -> tuple[int, ...]:
    """Numbers of the CPUs that this process may use: all, where the system keeps no such list."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))  # macOS
