"""The accelerators of this host, as far as files and variables tell without starting JAX."""

import glob
import os
from importlib import metadata

# NVIDIA, AMD, Intel and Google devices, where a process can see them.
DEVICE_FILES = ("/dev/nvidia[0-9]*", "/dev/kfd", "/dev/dri/renderD*", "/dev/accel[0-9]*")
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


def count_accelerators() -> int:
    """Accelerators of this host by their device files: NVIDIA's, else AMD's, else Google's."""
    amd = glob.glob("/dev/dri/renderD*") if os.path.exists("/dev/kfd") else []
    return len(glob.glob("/dev/nvidia[0-9]*") or amd or glob.glob("/dev/accel[0-9]*"))
