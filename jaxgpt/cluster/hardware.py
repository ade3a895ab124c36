"""This host's accelerators (found without JAX), CPUs and open-file limit."""

import glob
import os
import resource
from collections.abc import Mapping
from importlib import metadata

# Device files of NVIDIA, AMD, Intel and Google accelerators.
DEVICE_FILES = ("/dev/nvidia[0-9]*", "/dev/kfd", "/dev/dri/renderD*", "/dev/accel[0-9]*")
# Variables, set by users or launchers, that restrict which devices a process sees.
VISIBLE_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
)
# Maps part of a JAX plugin's name to the plugin's device files, and to the variables and values
# that hide these devices. renderD files are left out, because integrated GPUs have them too.
ROCM_HIDES = {"ROCR_VISIBLE_DEVICES": ("", "-1"), "HIP_VISIBLE_DEVICES": ("-1",)}
PLUGINS = {
    "cuda": (DEVICE_FILES[:1], {"CUDA_VISIBLE_DEVICES": ("", "-1")}),
    "rocm": (DEVICE_FILES[1:2], ROCM_HIDES),
}


def accelerator_expected() -> bool:
    """Return whether JAX is expected to find an accelerator on this host. This does not import JAX.

    If JAX_PLATFORMS is not empty, an accelerator is expected unless its value is `cpu`. Otherwise,
    an accelerator is expected if a JAX plugin is installed, this host has one of the plugin's
    device files, and the environment does not hide the devices. A plugin that is not in `PLUGINS`
    may use any of `DEVICE_FILES`.
    """
    if platforms := os.environ.get("JAX_PLATFORMS"):
        return platforms != "cpu"
    for plugin in metadata.entry_points(group="jax_plugins"):
        known = (row for part, row in PLUGINS.items() if part in plugin.name)
        files, hiding = next(known, (DEVICE_FILES, {}))
        hidden = any(os.environ.get(name) in values for name, values in hiding.items())
        if not hidden and any(map(glob.glob, files)):
            return True
    return False


def visible_devices(environ: Mapping[str, str]) -> tuple[str, list[str]] | None:
    """Return the variable that restricts the visible devices, and the names of these devices.

    This is the first of `VISIBLE_VARIABLES` that names a device or, if there is none, the first one
    that is set, without names, because it hides all devices. Returns None if no variable is set.
    """
    given = {
        variable: [name for name in environ[variable].split(",") if name not in ("", "-1")]
        for variable in VISIBLE_VARIABLES
        if variable in environ
    }
    return max(given.items(), key=lambda item: bool(item[1]), default=None)


def count_accelerators(only_usable: bool = False) -> int:
    """Return the number of accelerators on this host, based on device files.

    Only devices of the first vendor found (NVIDIA, AMD or Google) are counted. Intel accelerators,
    and TPUs without a file /dev/accel*, are not counted. However, if AMD is found first, render
    devices of all vendors are counted. Devices hidden by environment variables are also counted.
    If `only_usable` is True, devices whose files this process may not open are not counted.
    """
    find = _usable if only_usable else glob.glob
    amd = find("/dev/dri/renderD*") if os.path.exists("/dev/kfd") else []
    return len(find("/dev/nvidia[0-9]*") or amd or find("/dev/accel[0-9]*"))


def usable_device_files() -> list[str]:
    """Return the names of the device files that this process may open, sorted.

    A cgroup can deny access to some of them, as Slurm does for the devices of other tasks.
    """
    return sorted(os.path.basename(f) for pattern in DEVICE_FILES for f in _usable(pattern))


def _usable(pattern: str) -> list[str]:
    return [file for file in glob.glob(pattern) if os.access(file, os.R_OK | os.W_OK)]


def own_cpus() -> tuple[int, ...]:
    """Return the IDs of the CPUs that this process may use (all CPUs on macOS)."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))  # macOS


def raise_open_file_limit(wanted: int) -> int:
    """Let this process open `wanted` files, or as many as the hard limit allows.

    Returns `wanted`, or the hard limit if that is lower. The soft limit is never lowered.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return limit
