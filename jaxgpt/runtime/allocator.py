"""How glibc's malloc hands out memory to jobs on CPUs.

XLA takes the temporary memory of a step from malloc and gives it back after the step. malloc
returns what is large to the kernel at once, which hands it out again page by page, each filled
with zeros first: up to a third of a step's time. GLIBC_TUNABLES, which glibc reads only when a
program starts, has malloc keep what is not very large, and ask for pages of 2 MiB and not 4 KiB.
"""

import os
import sys
from collections.abc import Mapping

from jaxgpt.cluster.accelerators import accelerator_expected

VARIABLE = "GLIBC_TUNABLES"
KEPT_BYTES = 2**28
"""Allocations up to this size are kept for the next ones, and so much that is free may stay with
each process. Keeping larger ones would leave holes, which cost more memory than they save time."""
SETTINGS = {
    "glibc.malloc.hugetlb": 1,
    "glibc.malloc.mmap_threshold": KEPT_BYTES,
    "glibc.malloc.trim_threshold": KEPT_BYTES,
    "glibc.malloc.arena_max": 1,  # the others of threads never keep more than 64 MiB
}
OURS = ":".join(f"{name}={value}" for name, value in SETTINGS.items())
FIRST_GLIBC = (2, 35)


def tune_malloc() -> None:
    """Starts this command again, as the same process, with `SETTINGS`.

    Nothing happens where glibc is older than 2.35 or absent, where accelerators do the work, and
    where the environment speaks of malloc already: `GLIBC_TUNABLES=glibc.malloc.hugetlb=0` keeps
    glibc's own ways.
    """
    if chosen_already() or not available() or accelerator_expected():
        return
    tunables = os.environ.get(VARIABLE, "")
    os.environ[VARIABLE] = f"{tunables}:{OURS}".lstrip(":")
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def without_tuning(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables as they were before `tune_malloc`."""
    out = dict(environment)
    before = out.get(VARIABLE, "").removesuffix(OURS).removesuffix(":")
    if before:
        out[VARIABLE] = before
    else:
        out.pop(VARIABLE, None)
    return out


def chosen_already() -> bool:
    """Whether whoever started this process has said how memory is to be handed out."""
    return (
        "glibc.malloc." in os.environ.get(VARIABLE, "")
        or "malloc" in os.environ.get("LD_PRELOAD", "")  # another one than glibc's
        or any(name.startswith("MALLOC_") for name in os.environ)
    )


def available() -> bool:
    """Whether the C library is a glibc that knows all of `SETTINGS`."""
    try:
        library, version = os.confstr("CS_GNU_LIBC_VERSION").split()
        number = tuple(map(int, version.split(".")[:2]))
    except (OSError, ValueError, AttributeError):  # not Linux, or another C library
        return False
    return library == "glibc" and number >= FIRST_GLIBC


def notes() -> list[str]:
    """A line for the log, if GLIBC_TUNABLES speaks of malloc."""
    tunables = os.environ.get(VARIABLE, "")
    return [f"malloc: {VARIABLE}={tunables}"] if "glibc.malloc." in tunables else []
