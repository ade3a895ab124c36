"""Time and bandwidth of the doctor's collectives, beside copying the same bytes on each device."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxgpt.bench.harness import Job, Result, Value, format_value, open_job
from jaxgpt.config import Config, MeshShape, UsageError, mesh_shape
from jaxgpt.doctor.collectives import default_sizes, measure_axis
from jaxgpt.parallel.mesh import make_mesh
from jaxgpt.runtime.initialize import initialize_jax

SECONDS = 60.0  # for all axes together; larger arrays are left out when they are over
COPIED_BYTES = 2**26  # as the largest arrays of the collectives
COPIES = 5  # one after the other, as many of the collectives are
COPY_ROUNDS = 5
HEADER = "time, bus bandwidth (as nccl-tests defines it), and its share of the copy's"


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
    config = Config().replace(parallel__mesh=mesh or "-1,1,1", model__n_head=0)
    shape = mesh_shape(config)
    with open_job(config) as job:
        if mesh is None and job.cluster.size == 1:
            shape = MeshShape(4)
        initialize_jax(job.cluster, shape)
        shape = mesh_shape(config, jax.device_count()) if mesh else default_sizes(job.cluster)
        devices = make_mesh(shape, job.cluster.hosts)
        axes = [axis for axis, n in devices.shape.items() if n > 1]
        copied = copy_bandwidth(devices, job)
        measurements = [
            asdict(m)
            for axis in axes
            for m in measure_axis(devices, axis, job.cluster, SECONDS / len(axes), job.log)
        ]
        for found in measurements:
            bandwidth = found["bus_bandwidth"]
            found["share_of_copy"] = bandwidth and bandwidth / copied
        lines = map(line, measurements) if axes else ["nothing to measure with one device"]
        values = {
            "mesh": dict(devices.shape),
            "devices": devices.size,
            "device_kind": devices.devices.flat[0].device_kind,
            "processes": job.cluster.size,
            "copied_bytes": Value(COPIED_BYTES, "bytes"),
            "copy_bandwidth": Value(copied, "B/s", "each device in its own memory, all together"),
            "measurements": Value(measurements, None, "\n".join([HEADER, *lines])),
        }
        return Result(values)


def line(found: dict[str, Any]) -> str:
    """Return a line of the table: one collective with arrays of one size."""
    start = f"  {found['collective']:<14} over {found['axis']:<7} of {found['n']:<4} "
    size = format_value(found["bytes"], "bytes")
    if found["error"]:
        return f"{start}{size:>9}  {found['error']}"
    seconds = format_value(found["seconds"], "s")
    bandwidth = format_value(found["bus_bandwidth"], "B/s")
    return f"{start}{size:>9}{seconds:>11}{bandwidth:>12}{found['share_of_copy']:>8.1%}"


def copy_bandwidth(mesh: Mesh, job: Job) -> float:
    """Return the bytes/s at which each device copies an array while all of them do."""
    place = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    length = COPIED_BYTES // 4
    x = jax.jit(lambda: jnp.ones((mesh.size, length), jnp.float32), out_shardings=place)()
    copy = jax.jit(jnp.copy, in_shardings=place, out_shardings=place)
    copy(x).block_until_ready()

    def copies() -> None:
        for _ in range(COPIES):
            copied = copy(x)
        copied.block_until_ready()  # once: on accelerators that can take longer than to copy

    seconds = [job.timed(copies)[1] for _ in range(COPY_ROUNDS)]
    return COPIES * COPIED_BYTES / statistics.median(seconds)
