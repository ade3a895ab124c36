"""How fast devices exchange arrays, beside copying the same on each of them.

The collectives are those that jaxgpt.doctor checks, and they are checked here, too.
"""

import statistics
import time
from dataclasses import asdict
from typing import Any

from jaxgpt.cluster.process_group import ProcessGroup, join_process_group
from jaxgpt.config import MESH_AXES, Config, mesh_sizes
from jaxgpt.runtime.initialize import initialize_jax

ALLOWED = 60.0  # seconds, all axes together; larger sizes are left out when they are over
COPIED_BYTES = 2**26  # as the largest arrays of the collectives
COPIES = 5  # one after the other, as many of the collectives are
COPY_ROUNDS = 5


def measure(given: str | None) -> dict[str, Any]:
    """Times every collective over each mesh axis by itself.

    Args:
        given: the mesh as in --mesh; None puts data over hosts and tensor inside, on one host all
            devices along data, and simulates four if there is but one process on a CPU.

    Returns:
        The measurements, and bytes/s that a device copies while all others do.

    Raises:
        UsageError: if the mesh cannot work.
    """
    # No model, whose heads a tensor axis would have to divide.
    config = Config().replace(parallel__mesh=given, model__n_head=0) if given else None
    cluster = join_process_group()
    alone = (4, 1, 1) if cluster.size == 1 else (-1, 1, 1)
    initialize_jax(cluster, mesh_sizes(config) if config else alone)
    import jax

    from jaxgpt.doctor.collectives import measure_axis
    from jaxgpt.doctor.examination import default_sizes
    from jaxgpt.parallel.mesh import make_mesh

    sizes = mesh_sizes(config, jax.device_count()) if config else default_sizes(cluster)
    mesh = make_mesh(sizes, cluster.hosts)
    axes = [axis for axis in MESH_AXES if mesh.shape[axis] > 1]
    copied = copy_bandwidth(mesh, cluster)
    measurements = [
        asdict(measurement)
        for axis in axes
        for measurement in measure_axis(mesh, axis, cluster, ALLOWED / len(axes), lambda what: None)
    ]
    for measurement in measurements:
        bandwidth = measurement["bus_bandwidth"]
        measurement["share_of_copy"] = bandwidth and bandwidth / copied
    return {
        "mesh": dict(mesh.shape),
        "devices": mesh.size,
        "device_kind": mesh.devices.flat[0].device_kind,
        "processes": cluster.size,
        "copy_bandwidth": copied,
        "copied_bytes": COPIED_BYTES,
        "measurements": measurements,
    }


def copy_bandwidth(mesh: Any, cluster: ProcessGroup) -> float:
    """Bytes/s at which each device copies an array in its memory while all of them do."""
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


def describe(found: dict[str, Any]) -> str:
    """What `measure` found, as a table for each mesh axis."""
    from jaxgpt.doctor.collectives import gigabytes, size_name

    several = "processes" if found["processes"] > 1 else "process"
    mesh = " ".join(f"{axis}={n}" for axis, n in found["mesh"].items())
    lines = [
        f"collectives: {found['devices']} x {found['device_kind']}, {found['processes']} "
        f"{several}, mesh {mesh}",
        f"copy: {gigabytes(found['copy_bandwidth'])} GB/s, each device "
        f"{size_name(found['copied_bytes'])} in its own memory while all others do",
    ]
    measured = found["measurements"]
    if not measured:
        lines.append("nothing to measure with one device: try mpiexec -n 4, or --mesh 4,1,1")
    for axis in dict.fromkeys(m["axis"] for m in measured):
        along = [m for m in measured if m["axis"] == axis]
        sizes = sorted({m["bytes"] for m in along})
        lines.append(f"over {axis}, {along[0]['n']} devices: ms and bus bandwidth in GB/s")
        lines.append(" " * 16 + "".join(f"{size_name(size):>16}" for size in sizes) + "   of copy")
        for name in dict.fromkeys(m["collective"] for m in along):
            row = {m["bytes"]: m for m in along if m["collective"] == name}
            wrong = next((m["error"] for m in row.values() if m["error"]), None)
            if wrong:
                lines.append(f"{name:16}{wrong}")
                continue
            cells = [
                f"{1e3 * m['seconds']:.3g} {gigabytes(m['bus_bandwidth']):>6}"
                if (m := row.get(size))
                else "-"
                for size in sizes
            ]
            share = row[max(row)]["share_of_copy"]
            lines.append(
                f"{name:16}" + "".join(f"{cell:>16}" for cell in cells) + f"{share:>10.1%}"
            )
    return "\n".join(lines)
