"""What the machine is."""

import shutil
import subprocess
import time
from importlib import metadata

from jaxgpt.doctor.prove.stage import Stage
from jaxgpt.perf.units import GIB

NVIDIA = ("driver_version", "memory.total", "clocks.sm", "clocks.max.sm", "power.limit")
COPIED = 2**28  # float32 elements on an accelerator; an eighth on a CPU
REPETITIONS = 10


def facts(stage: Stage) -> None:
    import jax

    from jaxgpt.cluster.hardware import own_cpus

    devices = jax.local_devices()
    stage.add("devices", f"{len(devices)} x {devices[0].device_kind}")
    limit = (devices[0].memory_stats() or {}).get("bytes_limit")
    stage.add("memory for JAX", limit and limit / GIB, "GiB")
    stage.add("host", f"{len(own_cpus())} cores")
    stage.add("versions", versions())
    if shutil.which("nvidia-smi"):
        query = [f"--query-gpu={','.join(NVIDIA)}", "--format=csv,noheader"]
        found = subprocess.run(["nvidia-smi", *query], capture_output=True, text=True)
        values = found.stdout.partition("\n")[0].split(", ")
        for name, value in zip(NVIDIA, values, strict=False):
            stage.add(name, value)
    stage.add("memory bandwidth, read and written", copy_rate(stage.on_gpu) / 1e9, "GB/s")


def versions() -> str:
    """Return the versions of JAX and what it stands on."""
    wanted = ("jax", "jaxlib", "flax", "optax", "orbax", "nvidia-cudnn", "nvidia-nccl", "triton")
    found = {d.name for d in metadata.distributions() if d.name.startswith(wanted)}
    return ", ".join(f"{name} {metadata.version(name)}" for name in sorted(found))


def copy_rate(on_gpu: bool) -> float:
    """Return the bytes/s at which a device reads and writes a large array."""
    import jax
    import jax.numpy as jnp

    x = jnp.zeros(COPIED if on_gpu else COPIED // 8)
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = add(x).block_until_ready()
    began = time.perf_counter()
    for _ in range(REPETITIONS):
        x = add(x)
    x.block_until_ready()
    return 2 * x.nbytes * REPETITIONS / (time.perf_counter() - began)
