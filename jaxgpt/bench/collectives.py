"""Time and bandwidth of the doctor's collectives, beside copying the same bytes on each device."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from jaxgpt.bench.harness import Result
from jaxgpt.cluster.process_group import ProcessGroup, join_process_group
from jaxgpt.config import Config, MeshShape, UsageError, mesh_shape
from jaxgpt.perf.units import count, format_bytes
from jaxgpt.runtime.initialize import initialize_jax

SECONDS = 60.0  # for all axes together; larger arrays are left out when they are over
COPIED_BYTES = 2**26  # as the largest arrays of the collectives
COPIES = 5  # one after the other, as many of the collectives are
COPY_ROUNDS = 5


def run(settings: Sequence[str], mesh: str | None = None) -> Result:
    """Check and time every collective over each mesh axis by itself.

    Args:
        settings: must be empty, as no model is trained.
        mesh: as in --mesh; None puts data over hosts and tensor inside, on one host all devices
            along data, and simulates four if there is but one process on a CPU.

    Raises:
        UsageError: if the mesh cannot work.
    """
    if settings:
        raise UsageError(f"bench collectives: {settings[0]}: unknown; it takes --mesh and --json")
    # No model, whose heads a tensor axis would have to divide.
    config = Config().replace(parallel__mesh=mesh, model__n_head=0) if mesh else None
    cluster = join_process_group()
    alone = MeshShape(4 if cluster.size == 1 else -1)
    initialize_jax(cluster, mesh_shape(config) if config else alone)
    import jax

    from jaxgpt.doctor.collectives import default_sizes, measure_axis
    from jaxgpt.parallel.mesh import make_mesh

    shape = mesh_shape(config, jax.device_count()) if config else default_sizes(cluster)
    devices = make_mesh(shape, cluster.hosts)
    axes = [axis for axis, n in devices.shape.items() if n > 1]
    copied = copy_bandwidth(devices, cluster)
    measurements = [
        asdict(m)
        for axis in axes
        for m in measure_axis(devices, axis, cluster, SECONDS / len(axes), lambda activity: None)
    ]
    for measurement in measurements:
        bandwidth = measurement["bus_bandwidth"]
        measurement["share_of_copy"] = bandwidth and bandwidth / copied
    values = {
        "mesh": dict(devices.shape),
        "devices": devices.size,
        "device_kind": devices.devices.flat[0].device_kind,
        "processes": cluster.size,
        "copy_bandwidth": copied,
        "copied_bytes": COPIED_BYTES,
        "measurements": measurements,
    }
    return Result(values, rows(values))


def copy_bandwidth(mesh: Any, cluster: ProcessGroup) -> float:
    """Return the bytes/s at which each device copies an array while all of them do."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    place = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    length = COPIED_BYTES // 4
    x = jax.jit(lambda: jnp.ones((mesh.size, length), jnp.float32), out_shardings=place)()
    copy = jax.jit(jnp.copy, in_shardings=place, out_shardings=place)
    copy(x).block_until_ready()

    def seconds() -> float:
        cluster.barrier()
        began = time.perf_counter()
        for _ in range(COPIES):
            copied = copy(x)
        copied.block_until_ready()  # once: on accelerators that can take longer than to copy
        return max(cluster.allgather(time.perf_counter() - began))

    return COPIES * COPIED_BYTES / statistics.median(seconds() for _ in range(COPY_ROUNDS))


def rows(values: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the values in words, with a table for each mesh axis."""
    from jaxgpt.doctor.collectives import gigabytes

    mesh = " ".join(f"{axis}={n}" for axis, n in values["mesh"].items())
    out = [
        ("collectives", f"{values['devices']} x {values['device_kind']}, "
         f"{count(values['processes'], 'process', 'es')}, mesh {mesh}"),
        ("copy", f"{gigabytes(values['copy_bandwidth'])} GB/s, each device "
         f"{format_bytes(values['copied_bytes'])} in its own memory while all others do"),
    ]  # fmt: skip
    measured = values["measurements"]
    if not measured:
        hint = "nothing to measure with one device: try mpiexec -n 4, or --mesh 4,1,1"
        out.append(("over no axis", hint))
    for axis in dict.fromkeys(m["axis"] for m in measured):
        along = [m for m in measured if m["axis"] == axis]
        sizes = sorted({m["bytes"] for m in along})
        out.append((f"over {axis}", f"{along[0]['n']} devices: ms and bus bandwidth in GB/s"))
        out.append(("", "".join(f"{format_bytes(size):>16}" for size in sizes) + "   of copy"))
        for name in dict.fromkeys(m["collective"] for m in along):
            of_sizes = {m["bytes"]: m for m in along if m["collective"] == name}
            cells = [
                f"{1e3 * m['seconds']:.3g} {gigabytes(m['bus_bandwidth']):>6}"
                if (m := of_sizes.get(size)) and not m["error"]
                else "-"
                for size in sizes
            ]
            last = of_sizes[max(of_sizes)]
            end = f"   {last['error']}" if last["error"] else f"{last['share_of_copy']:>10.1%}"
            out.append((name, "".join(f"{cell:>16}" for cell in cells) + end))
    return out
