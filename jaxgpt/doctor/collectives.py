"""Collectives over one mesh axis: explanations, checks and timings.

All groups of devices along the axis run a collective at the same time.
"""

import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxgpt.cluster.process_group import ProcessGroup
from jaxgpt.config import MeshShape
from jaxgpt.doctor.checks import Check
from jaxgpt.parallel.collectives import reduce_scatter
from jaxgpt.parallel.mesh import device_hosts, hosts_spanned
from jaxgpt.perf.collectives import ring_bytes
from jaxgpt.perf.hardware import find_device
from jaxgpt.perf.units import format_bytes

# Maps an array size in bytes to the number of timed calls.
REPETITIONS = {2**10: 20, 2**15: 20, 2**20: 10, 2**24: 3, 2**26: 3}
SIZES = tuple(REPETITIONS)
MAX_SECONDS = 0.1  # per call; a slower collective is not run with larger arrays
LARGE = 2**24  # bytes; bandwidth is compared with the data sheet only at this size and above
CHECKED = 4096  # maximum number of elements of each result to compare with NumPy
ALL = None  # used instead of a source device if the result is a sum over the axis


@dataclass(frozen=True)
class CollectiveTest:
    """A collective over one mesh axis, and its expected result.

    n is the number of devices along the axis. Each device starts with a float32 array of shape
    (n * part,), or (part,) if `from_parts` is True.
    """

    name: str
    meaning: str  # explanation for newcomers
    run: Callable[[jax.Array, str, int], jax.Array]
    """(one device's array, mesh axis, n) -> one device's result, a float32 array with one axis.
    This is called inside `jax.shard_map`."""
    source: Callable[[int, int, int, np.ndarray], tuple[Any, np.ndarray]]
    """(device, n, part, positions (k,) in its result) -> (source device, source positions (k,)).
    Devices are numbered from 0 along the axis. The source device is an int, an array of shape (k,),
    or `ALL` if the result is a sum over the axis."""
    from_parts: bool = False  # whether each device starts with only one of the n parts


COLLECTIVE_TESTS = (
    CollectiveTest(
        "all-reduce",
        "every device gets the sum of all devices' arrays (gradients in data parallelism)",
        run=lambda x, axis, n: lax.psum(x, axis),
        source=lambda own, n, part, i: (ALL, i),
    ),
    CollectiveTest(
        "all-gather",
        "every device has one part and gets all parts in order (weights in ZeRO-3)",
        run=lambda x, axis, n: lax.all_gather(x, axis, tiled=True),
        source=lambda own, n, part, i: (i // part, i % part),
        from_parts=True,
    ),
    CollectiveTest(
        "reduce-scatter",
        "device i gets part i of the sum (gradients in ZeRO-2 and ZeRO-3; between CPU processes, "
        "an all-to-all and local sums)",
        run=lambda x, axis, n: reduce_scatter(x, axis, 0),
        source=lambda own, n, part, i: (ALL, own * part + i),
    ),
    CollectiveTest(
        "all-to-all",
        "device i sends its part j to device j, a transpose across devices (experts, Ulysses)",
        run=lambda x, axis, n: lax.all_to_all(x.reshape(n, -1), axis, 0, 0).reshape(-1),
        source=lambda own, n, part, i: (i // part, own * part + i % part),
    ),
    CollectiveTest(
        "collective-permute",
        "device i sends its array to device i + 1, the last one to device 0 (pipelines, rings)",
        run=lambda x, axis, n: lax.ppermute(x, axis, [(i, (i + 1) % n) for i in range(n)]),
        source=lambda own, n, part, i: ((own - 1) % n, i),
    ),
)


@dataclass(frozen=True)
class Measurement:
    """Time and bandwidth of one collective over one mesh axis, for one array size."""

    collective: str
    axis: str
    n: int  # number of devices along the axis
    bytes: int  # size of one device's input or output, whichever is larger, before rounding up
    seconds: float | None  # time per call on the slowest process; None after an error
    bus_bandwidth: float | None  # bytes/s, as defined by nccl-tests; None after an error
    error: str | None = None  # error of the lowest rank that failed


def default_mesh_shape(cluster: ProcessGroup) -> MeshShape:
    """Return the default mesh: `data` across hosts and `tensor` within each host.

    If there is one host, or if hosts have different numbers of devices, all devices are on `data`.
    """
    on_host = Counter(cluster.hosts[device.process_index] for device in jax.devices())
    if len(on_host) == 1 or len(set(on_host.values())) > 1:
        return MeshShape(on_host.total())
    return MeshShape(len(on_host), 1, on_host.total() // len(on_host))


def axis_link(mesh: Mesh, axis: str, cluster: ProcessGroup) -> tuple[bool, float | None]:
    """Return whether an axis spans several hosts, and a device's peak bandwidth along this axis.

    The peak is in bytes/s, or None if `perf.hardware` does not list one for the device.
    """
    crosses = hosts_spanned([axis], mesh.shape, device_hosts(mesh, cluster.hosts)) > 1
    device = find_device(mesh.devices.flat[0].device_kind)
    if device is None:
        return crosses, None
    return crosses, device.network_bandwidth if crosses else device.link_bandwidth


def measure_axis(
    mesh: Mesh,
    axis: str,
    cluster: ProcessGroup,
    allowed: float,
    set_activity: Callable[[str], None],
) -> list[Measurement]:
    """Check and time all collectives over one axis, with several array sizes.

    Returns the measurements, ordered by size and then by collective. Every collective runs with the
    smallest array, even if this takes more than `allowed` seconds. No measurement with a larger
    array starts after `allowed` seconds on process 0. A collective that failed, or took more than
    `MAX_SECONDS` per call, is not run with larger arrays. `set_activity` is called with a
    description of each measurement before it begins. Every process must call this function.
    """
    out: list[Measurement] = []
    n, deadline, left = mesh.shape[axis], time.monotonic() + allowed, list(COLLECTIVE_TESTS)
    for size in SIZES:
        for collective in tuple(left):
            # Process 0 decides when to stop, because a process that stops alone would deadlock the
            # others.
            if size > SIZES[0] and cluster.broadcast(time.monotonic() > deadline):
                return out
            activity = f"{collective.name} over {axis}, {format_bytes(size)}"
            set_activity(activity)
            found, error = try_on_all(activity, cluster, measure, mesh, axis, collective, size)
            seconds = None if error else max(found)
            bandwidth = seconds and ring_bytes(collective.name, size, n) / seconds
            out.append(Measurement(collective.name, axis, n, size, seconds, bandwidth, error))
            if error or seconds > MAX_SECONDS:
                left.remove(collective)
    return out


def try_on_all(
    activity: str, cluster: ProcessGroup, function: Callable[..., Any], *arguments: Any
) -> tuple[list[Any], str | None]:
    """Call a function on every process. Return the results, and an error message or None.

    Every process must call this. The results are in the order of the ranks. The error message comes
    from the lowest rank that failed. The result of a failed process is None. The results must be
    JSON values. A failed process immediately prints `activity` and its error to stderr, because
    the other processes may be stuck in a collective and never receive the message.
    """
    result = error = None
    try:
        result = function(*arguments)
    except Exception as e:  # XLA, NCCL and Gloo raise various types; report any of them
        error = f"{type(e).__name__}: {str(e).partition(chr(10))[0]}"
        print(f"process {cluster.rank}: {activity}: {error}", file=sys.stderr, flush=True)
    found = cluster.allgather([result, error])
    errors = [f"process {rank}: {error}" for rank, (_, error) in enumerate(found) if error]
    return [result for result, _ in found], errors[0] if errors else None


def measure(mesh: Mesh, axis: str, collective: CollectiveTest, size: int) -> float:
    """Return the mean time in seconds per call of a collective, as measured on this process.

    `size` is the size of the whole float32 array in bytes, and must be a key of `REPETITIONS`. It
    is rounded up so that the devices along the axis have equal parts. Every process must call this.
    Up to `CHECKED` elements of each local device's result are checked. Raises `ArithmeticError` if
    one of them is wrong. XLA's errors are propagated.
    """
    n = mesh.shape[axis]
    part = -(-size // (4 * n))
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    length = part if collective.from_parts else part * n
    devices, positions = jnp.arange(mesh.size)[:, None], jnp.arange(length)
    x = jax.jit(lambda: pattern(devices, positions), out_shardings=sharding)()

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=sharding.spec, out_specs=sharding.spec, check_vma=False)
    def run(x: jax.Array) -> jax.Array:
        return collective.run(x[0], axis, n)[None]

    checked = run(x).block_until_ready()
    run(x).block_until_ready()
    began = time.perf_counter()
    for _ in range(REPETITIONS[size]):
        result = run(x)
    result.block_until_ready()
    seconds = (time.perf_counter() - began) / REPETITIONS[size]
    # Check the result only after timing, because an earlier error would deadlock other processes.
    _check_result(mesh, axis, collective, part, checked)
    return seconds


def pattern(device: Any, position: Any) -> Any:
    """Return elements of the devices' inputs: whole numbers from 0 to 1008, as float32.

    `device` and `position` are integers or integer arrays, and at least one of them is an array.
    The result has their broadcast shape.
    """
    return ((37 * device + position) % 1009).astype(np.float32)


def _check_result(
    mesh: Mesh, axis: str, collective: CollectiveTest, part: int, result: jax.Array
) -> None:
    """Compare each local device's result with NumPy, at up to `CHECKED` evenly spaced elements.

    `result` has one row for each device, in the order of the flattened mesh. `part` is the length
    of the whole array divided by the number of devices along the axis. Raises `ArithmeticError` for
    the first wrong element.
    """
    n = mesh.shape[axis]
    numbers = np.arange(mesh.size).reshape(mesh.devices.shape)  # rows of the input
    groups = np.moveaxis(numbers, mesh.axis_names.index(axis), -1).reshape(-1, n)
    for shard in result.addressable_shards:
        found = np.asarray(shard.data)[0]
        group, own = np.argwhere(groups == (shard.index[0].start or 0))[0]
        i = np.unique(np.linspace(0, found.size - 1, CHECKED).astype(np.int64))
        device, position = collective.source(own, n, part, i)
        if device is ALL:
            expected = pattern(groups[group, :, None], position).sum(axis=0)
        else:
            expected = pattern(groups[group, device], position)
        wrong = np.flatnonzero(found[i] != expected)
        if wrong.size:
            first = wrong[0]
            raise ArithmeticError(
                f"wrong result: element {i[first]} of device {own} is {found[i][first]:g}, "
                f"not {expected[first]:g}"
            )


def collective_checks(measurements: Sequence[Measurement], peak: float | None) -> list[Check]:
    """Return one check for each collective over an axis, given the result of `measure_axis`.

    `peak` is the peak bandwidth of a device along the axis in bytes/s, or None if it is unknown. A
    check is FAIL if the collective failed. The all-reduce check is WARN if the bandwidth for the
    largest measured array is less than a tenth of `peak` and this array has at least `LARGE` bytes.
    """
    out = []
    for collective in COLLECTIVE_TESTS:
        found = [m for m in measurements if m.collective == collective.name]
        first, last = found[0], found[-1]
        name, bandwidth = f"{collective.name} over {last.axis}", last.bus_bandwidth
        if last.error:
            finding = f"at {format_bytes(last.bytes)}, {last.error}"
            remedy = "run again with NCCL_DEBUG=INFO or TF_CPP_MIN_LOG_LEVEL=0, on fewer hosts"
            out.append(Check(name, "FAIL", finding, remedy))
            continue
        finding = (
            f"{collective.meaning}; result correct, {1000 * first.seconds:.3g} ms at "
            f"{format_bytes(first.bytes)}, {bandwidth / 1e9:.3g} GB/s at {format_bytes(last.bytes)}"
        )
        remedy = ""
        # Compare only large all-reduces. Data sheets list peak bandwidths, but latency dominates
        # for smaller arrays.
        is_comparable = last.bytes >= LARGE and collective.name == "all-reduce"
        if peak and is_comparable and bandwidth < peak / 10:
            finding += f", less than {peak / 1e10:.3g} GB/s, a tenth of the data sheet's value"
            remedy = (
                "run again with NCCL_DEBUG=INFO; if NCCL uses sockets, load this machine's network "
                "plugin"
            )
        out.append(Check(name, "WARN" if remedy else "OK", finding, remedy))
    return out
