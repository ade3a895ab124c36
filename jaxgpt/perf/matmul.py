"""Measurement of the FLOP/s of large matmuls."""

import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxgpt.cluster.process_group import ProcessGroup

MATMUL_SECONDS = 0.15  # target duration of one measurement


def matmul_size() -> int:
    """Return a matrix size that lets matmuls come close to the devices' peak speed."""
    return 1024 if jax.default_backend() == "cpu" else 8192


def matmul_rate(size: int, dtype: str, cluster: ProcessGroup) -> Callable[[], float]:
    """Return a function that measures the job's total FLOP/s in `size` x `size` matmuls.

    All devices multiply at the same time, so all processes must call `matmul_rate` and the returned
    function together. CPU devices share the cores.
    """
    n = jax.device_count()
    mesh = Mesh(np.array(jax.devices()), ("device",), axis_types=(AxisType.Auto,))
    each = NamedSharding(mesh, PartitionSpec("device"))
    draw = jax.jit(lambda key: jax.random.normal(key, (n, size, size), dtype), out_shardings=each)
    multiply = jax.jit(jnp.matmul, out_shardings=each)
    a, b = draw(jax.random.key(0)), draw(jax.random.key(1))

    def seconds(times: int) -> float:
        cluster.barrier()
        began = time.perf_counter()
        for _ in range(times):
            out = multiply(a, b)
        out.block_until_ready()
        # Use the slowest process's time, because faster processes had an extra share of the cores.
        return max(cluster.allgather(time.perf_counter() - began)) / times

    seconds(1)  # compiles
    one = statistics.median(seconds(1) for _ in range(3))
    times = max(1, round(MATMUL_SECONDS / one))
    return lambda: 2 * size**3 * n / seconds(times)


def measured_peak(dtype: str) -> float:
    """Return the total FLOP/s of all devices in large matmuls, as the median of 7 measurements.

    The job must have only one process.
    """
    rate = matmul_rate(matmul_size(), dtype, ProcessGroup(launcher="none"))
    return statistics.median(rate() for _ in range(7))
