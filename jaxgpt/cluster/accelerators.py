"""The accelerators of this host, as far as files and variables tell without starting JAX."""

import glob
import os
from importlib import metadata

# NVIDIA, AMD, Intel and Google devices, where a process can see them.
DEVICE_FILES = ("/dev/nvidia[0-9]*", "/dev/kfd", "/dev/dri/renderD*", "/dev/accel[0-9]*")
USABLE = 0.9  # of a device's memory; the rest goes to the driver, NCCL and fragmentation
# What tells XLA its share; the second is the name of before.
MEMORY_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
# What narrows the devices that a process sees; set by users and by some launchers.
VISIBLE_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
)
# Of a plugin of JAX, by a part of its name: the files that it uses, and not any, as a laptop's own
# graphics are a renderD, too; and the variables that hide them, by which words.
PLUGINS = {
    "cuda": (DEVICE_FILES[:1], {"CUDA_VISIBLE_DEVICES": ("", "-1")}),
    "rocm": (
        DEVICE_FILES[1:2],
        {"ROCR_VISIBLE_DEVICES": ("", "-1"), "HIP_VISIBLE_DEVICES": ("-1",)},
    ),
}


def accelerator_expected() -> bool:
    """Whether JAX will look for something other than CPUs here, judged without importing JAX."""
    platforms = os.environ.get("JAX_PLATFORMS", "")
    if platforms:
        return platforms != "cpu"
    return any(
        glob.glob(pattern)
        for plugin in metadata.entry_points(group="jax_plugins")
        for pattern in _device_files(plugin.name)
    )


def _device_files(plugin: str) -> tuple[str, ...]:
    known = (found for part, found in PLUGINS.items() if part in plugin)
    files, hiding = next(known, (DEVICE_FILES, {}))
    hidden = any(os.environ.get(name) in words for name, words in hiding.items())
    return () if hidden else files


def reserve_memory() -> list[str]:
    """Has XLA take `USABLE` of each GPU's memory and not three quarters, unless the user has said.

    Returns:
        Lines for the log.
    """
    has_gpu = any(glob.glob(pattern) for pattern in DEVICE_FILES[:2])
    if not has_gpu or any(os.environ.get(name) for name in MEMORY_VARIABLES):
        return []
    os.environ[MEMORY_VARIABLES[0]] = str(USABLE)
    return [
        f"GPU memory: a process takes {USABLE:.0%} of each that it uses; XLA's own default is "
        f"75%, and {MEMORY_VARIABLES[0]} is another share"
    ]


def count_accelerators() -> int:
    """Accelerators of this host by their device files: NVIDIA's, else AMD's, else Google's."""
    amd = glob.glob("/dev/dri/renderD*") if os.path.exists("/dev/kfd") else []
    return len(glob.glob("/dev/nvidia[0-9]*") or amd or glob.glob("/dev/accel[0-9]*"))
