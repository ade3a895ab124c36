"""Memory in pages of 2 MiB for jobs on CPUs.

XLA takes the temporary memory of a step from malloc and gives it back after the step, and the
kernel hands it out again page by page, each filled with zeros first: with pages of 4 KiB that is
up to a third of a step's time. glibc asks for large pages where GLIBC_TUNABLES tells it to, which
it reads only when a program starts.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from jaxgpt.distributed.accelerators import accelerator_expected

TUNABLES = "GLIBC_TUNABLES"
TUNABLE = "glibc.malloc.hugetlb"
FIRST_GLIBC = (2, 35)  # that knows it
KERNEL_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def use_huge_pages() -> None:
    """Starts this command again, as the same process, so that malloc uses huge pages.

    Nothing happens where they would not come of it, where accelerators do the work, and where
    GLIBC_TUNABLES speaks of them already: `GLIBC_TUNABLES=glibc.malloc.hugetlb=0` keeps small ones.
    """
    tunables = os.environ.get(TUNABLES, "")
    if TUNABLE in tunables or not available() or accelerator_expected():
        return
    os.environ[TUNABLES] = f"{tunables}:{TUNABLE}=1".lstrip(":")
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def without_huge_pages(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables as they were before `use_huge_pages`."""
    out = dict(environment)
    before = out.get(TUNABLES, "").removesuffix(f"{TUNABLE}=1").removesuffix(":")
    if before:
        out[TUNABLES] = before
    else:
        out.pop(TUNABLES, None)
    return out


def available() -> bool:
    """Whether the kernel gives huge pages to those who ask, and only to them, and glibc can."""
    try:
        library, version = os.confstr("CS_GNU_LIBC_VERSION").split()
        setting = KERNEL_SETTING.read_text()
    except (OSError, ValueError, AttributeError):  # not Linux, or another C library
        return False
    new_enough = tuple(map(int, version.split(".")[:2])) >= FIRST_GLIBC
    return library == "glibc" and new_enough and "[madvise]" in setting


def notes() -> list[str]:
    """A line for the log, if GLIBC_TUNABLES speaks of huge pages."""
    tunables = os.environ.get(TUNABLES, "")
    return [f"malloc: {TUNABLES}={tunables}"] if TUNABLE in tunables else []
