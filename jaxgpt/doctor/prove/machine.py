"""Facts about the machine. As a command, `python -m jaxgpt.doctor.prove.machine`, it uses JAX."""

import json
import shutil
import subprocess
import time
from importlib import metadata

from jaxgpt.cluster.hardware import accelerator_expected, own_cpus
from jaxgpt.doctor.prove.check import Check
from jaxgpt.perf.units import GIB

NVIDIA = ("driver_version", "memory.total", "clocks.sm", "clocks.max.sm", "power.limit")
VERSIONS = ("jax", "jaxlib", "flax", "optax", "orbax", "nvidia-cudnn", "nvidia-nccl", "triton")
COPIED = 2**28  # float32 elements on an accelerator; an eighth on a CPU
REPETITIONS = 10


def facts(check: Check) -> None:
    found = check.json("jaxgpt.doctor.prove.machine")
    check.add("devices", found["devices"])
    check.add("memory for JAX", found["bytes_limit"] and found["bytes_limit"] / GIB, "GiB")
    check.add("host", f"{len(own_cpus())} cores")
    installed = {d.name: d.version for d in metadata.distributions() if d.name.startswith(VERSIONS)}
    check.add("versions", ", ".join(f"{name} {installed[name]}" for name in sorted(installed)))
    if shutil.which("nvidia-smi"):
        query = [f"--query-gpu={','.join(NVIDIA)}", "--format=csv,noheader"]
        printed = subprocess.run(["nvidia-smi", *query], capture_output=True, text=True).stdout
        for name, value in zip(NVIDIA, printed.partition("\n")[0].split(", "), strict=False):
            check.add(name, value)
    check.add("memory bandwidth, read and written", found["copy_rate"] / 1e9, "GB/s")


def copy_rate() -> float:
    """Return the bytes/s at which a device reads and writes a large array."""
    import jax
    import jax.numpy as jnp

    x = jnp.zeros(COPIED if accelerator_expected() else COPIED // 8)
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = add(x).block_until_ready()
    began = time.perf_counter()
    for _ in range(REPETITIONS):
        x = add(x)
    x.block_until_ready()
    return 2 * x.nbytes * REPETITIONS / (time.perf_counter() - began)


def main() -> None:
    import jax

    devices = jax.local_devices()
    found = {
        "devices": f"{len(devices)} x {devices[0].device_kind}",
        "bytes_limit": (devices[0].memory_stats() or {}).get("bytes_limit"),
        "copy_rate": copy_rate(),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
