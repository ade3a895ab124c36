"""Memory allocation: malloc options for CPU jobs, and XLA's share of GPU memory."""

import contextlib
import ctypes
import glob
import os
import re
from pathlib import Path

from jaxgpt.cluster.hardware import DEVICE_FILES

# malloc keeps freed blocks that are smaller than this. Larger blocks would fragment the heap.
KEPT_BYTES = 2**29
# Options and values for mallopt: M_ARENA_MAX (1, because other arenas keep at most 64 MiB),
# M_MMAP_THRESHOLD, M_TRIM_THRESHOLD and M_TOP_PAD (bytes added when the heap grows).
MALLOC_OPTIONS = ((-8, 1), (-3, KEPT_BYTES), (-1, KEPT_BYTES), (-2, 2**31 - 2**21))
MADV_HUGEPAGE = 14  # back the heap with 2 MiB pages

USABLE = 0.9  # fraction of GPU memory; the driver, NCCL and fragmentation need the rest
# Current and old names of the variable that sets XLA's fraction of GPU memory.
MEMORY_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")


def keep_freed_memory() -> list[str]:
    """Make glibc's malloc keep freed blocks unless the user has configured malloc.

    If glibc accepts `MALLOC_OPTIONS`, malloc keeps freed blocks smaller than `KEPT_BYTES`, but at
    most about 2 GiB at the end of the heap. The heap uses huge pages if possible. Returns a list
    with a log line if the user has configured malloc, and an empty list otherwise. If the C library
    is not glibc, this does nothing. Call this before XLA starts its threads.
    """
    for name, value in os.environ.items():
        if (
            name.startswith("MALLOC_")
            or (name == "GLIBC_TUNABLES" and "glibc.malloc." in value)
            or (name == "LD_PRELOAD" and "malloc" in value)
        ):
            return [f"malloc: unchanged, because the environment has {name}={value}"]
    with contextlib.suppress(AttributeError, OSError):  # not glibc
        libc = ctypes.CDLL(None)
        libc.malloc.restype = ctypes.c_void_p
        for option, value in MALLOC_OPTIONS:
            libc.mallopt(option, value)
        libc.free(ctypes.c_void_p(libc.malloc(2**20)))  # grow the heap by M_TOP_PAD
        maps = Path("/proc/self/maps").read_text(errors="replace")  # file names may not be UTF-8
        heap = re.search(r"^(\w+)-(\w+) .*\[heap\]$", maps, re.M)
        start, end = (int(address, 16) for address in heap.groups())
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_HUGEPAGE)
    return []


def reserve_gpu_memory() -> list[str]:
    """Set XLA's share of GPU memory to `USABLE` unless the user has set a share.

    This sets XLA_CLIENT_MEM_FRACTION and returns a list with a log line. If one of
    `MEMORY_VARIABLES` is set to a nonempty value, or if the host has no NVIDIA or AMD GPU, it does
    nothing and returns an empty list. Call this before JAX starts.
    """
    has_gpu = any(glob.glob(pattern) for pattern in DEVICE_FILES[:2])
    if not has_gpu or any(os.environ.get(name) for name in MEMORY_VARIABLES):
        return []
    os.environ[MEMORY_VARIABLES[0]] = str(USABLE)
    return [
        f"GPU memory: each process reserves {USABLE:.0%} of its GPUs' memory (XLA's default is "
        f"75%); set {MEMORY_VARIABLES[0]} to change the share"
    ]
