"""What the devices of a job reach in large matrix products: more than a step can."""

import statistics
import time
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxgpt.cluster.process_group import ProcessGroup

CPU_SIZES = (512, 1024, 2048)
ACCELERATOR_SIZES = (2048, 4096, 8192)
SECONDS = 0.15  # that one measurement takes, about


def fastest_size(dtype: str, cluster: ProcessGroup) -> int:
    """The size of square matrices, of several, whose products are fastest."""
    sizes = CPU_SIZES if jax.default_backend() == "cpu" else ACCELERATOR_SIZES
    return cluster.broadcast(max(sizes, key=lambda size: matmul_rate(size, dtype, cluster)()))


def matmul_rate(size: int, dtype: str, cluster: ProcessGroup) -> Callable[[], float]:
    """A function that measures FLOP/s of the job in products of size x size matrices.

    All devices of the job multiply at the same time, each matrices of its own. On CPUs they share
    the cores, so that this is what the machine does, and not that of one device times n.
    """
    devices = np.array(jax.devices())
    mesh = Mesh(devices, ("device",), axis_types=(AxisType.Auto,))
    each = PartitionSpec("device")
    draw = jax.jit(
        lambda key: jax.random.normal(key, (devices.size, size, size), dtype),
        out_shardings=NamedSharding(mesh, each),
    )

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(each, each), out_specs=each)
    def multiply(a: jax.Array, b: jax.Array) -> jax.Array:
        return (a[0] @ b[0])[None]

    a, b = draw(jax.random.key(0)), draw(jax.random.key(1))

    def seconds(times: int) -> float:
        cluster.barrier()
        began = time.perf_counter()
        for _ in range(times):
            out = multiply(a, b)
        out.block_until_ready()
        # Of all processes: the first to end has had more than its share of the cores.
        return max(cluster.allgather(time.perf_counter() - began)) / times

    seconds(1)  # compiles
    one = statistics.median(seconds(1) for _ in range(3))
    times = max(1, round(SECONDS / one))
    return lambda: 2 * size**3 * devices.size / seconds(times)
