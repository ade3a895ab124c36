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


def accelerator_expected() -> bool:
    """Whether JAX will look for something other than CPUs here, judged without importing JAX."""
    platforms = os.environ.get("JAX_PLATFORMS", "")
    if platforms:
        return platforms != "cpu"
    has_plugin = bool(metadata.entry_points(group="jax_plugins"))
    return has_plugin and any(glob.glob(pattern) for pattern in DEVICE_FILES)


def count_accelerators() -> int:
    """Accelerators of this host by their device files: NVIDIA's, else AMD's, else Google's."""
    amd = glob.glob("/dev/dri/renderD*") if os.path.exists("/dev/kfd") else []
    return len(glob.glob("/dev/nvidia[0-9]*") or amd or glob.glob("/dev/accel[0-9]*"))
