"""Eight collectives over a mesh axis, each explained, checked and timed.

Every device of the axis takes part; groups along the other axes do the same at the same time, as
in training.
"""

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxgpt.cluster.process_group import ProcessGroup
from jaxgpt.doctor.checks import Check, fail, ok, warn
from jaxgpt.parallel.collectives import reduce_scatter
from jaxgpt.perf.units import format_bytes

T = TypeVar("T")

# Bytes of an array -> how often the time of it is taken.
REPETITIONS = {2**10: 20, 2**15: 20, 2**20: 10, 2**24: 3, 2**26: 3}
SIZES = tuple(REPETITIONS)
MAX_SECONDS = 5.0  # a larger size that would take longer than this is left out
PERIOD = 1009  # elements after which the pattern in the arrays repeats
CHECKED = 4096  # elements of a result that are compared with what they should be

# (device m, positions i) -> the elements that device m puts in there
Value = Callable[[np.ndarray | int, np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Collective:
    """One way for n devices to exchange arrays. Device 0 is the root, where there is one."""

    name: str
    meaning: str
    """Its effect, in a line for someone who has not met it."""
    run: Callable[[jax.Array, str, int], jax.Array]
    """(array of one device, mesh axis, n) -> array of one device, inside `jax.shard_map`."""
    expected: Callable[[Value, int, int, int, np.ndarray], np.ndarray]
    """(value, n, own number, part, positions) -> the result there, by NumPy; `part` is the length
    of one of n parts of an array."""
    bus_factor: Callable[[int], float]
    """n -> bus bandwidth / (bytes / time); see `bus_bandwidth`."""
    from_parts: bool = False
    """True if each device puts in only one of n parts."""


def _from_root(x: jax.Array, axis: str) -> jax.Array:
    return jnp.where(lax.axis_index(axis) == 0, x, 0)


def _sum(value: Value, n: int, positions: np.ndarray) -> np.ndarray:
    return np.sum([value(m, positions) for m in range(n)], axis=0)


# JAX has no reduce and no scatter, and its broadcast, lax.pbroadcast, does not run on CPUs
# (JAX 0.10, 0.11): these three are made of others, as their lines say.
COLLECTIVES = (
    Collective(
        "all-reduce",
        "every device gets the sum of the arrays of all (gradients of data parallelism)",
        run=lambda x, axis, n: lax.psum(x, axis),
        expected=lambda value, n, own, part, i: _sum(value, n, i),
        bus_factor=lambda n: 2 * (n - 1) / n,
    ),
    Collective(
        "reduce",
        "device 0 gets the sum (here an all-reduce of which the others keep nothing)",
        run=lambda x, axis, n: jnp.where(lax.axis_index(axis) == 0, lax.psum(x, axis), x),
        expected=lambda value, n, own, part, i: _sum(value, n, i) if own == 0 else value(own, i),
        bus_factor=lambda n: 1.0,
    ),
    Collective(
        "broadcast",
        "every device gets the array of device 0 (here an all-reduce in which the others are 0)",
        run=lambda x, axis, n: lax.psum(_from_root(x, axis), axis),
        expected=lambda value, n, own, part, i: value(0, i),
        bus_factor=lambda n: 1.0,
    ),
    Collective(
        "all-gather",
        "every device has one part and gets all, in order (weights of ZeRO-3, when used)",
        run=lambda x, axis, n: lax.all_gather(x, axis, tiled=True),
        expected=lambda value, n, own, part, i: value(i // part, i % part),
        bus_factor=lambda n: (n - 1) / n,
        from_parts=True,
    ),
    Collective(
        "reduce-scatter",
        "device i gets part i of the sum (gradients of ZeRO-2 and ZeRO-3; here, in CPU jobs, an "
        "all-to-all and sums)",
        run=lambda x, axis, n: reduce_scatter(x, axis, 0),
        expected=lambda value, n, own, part, i: _sum(value, n, own * part + i),
        bus_factor=lambda n: (n - 1) / n,
    ),
    Collective(
        "scatter",
        "device i gets part i of device 0's array (here a reduce-scatter in which the others "
        "are 0)",
        run=lambda x, axis, n: reduce_scatter(_from_root(x, axis), axis, 0),
        expected=lambda value, n, own, part, i: value(0, own * part + i),
        bus_factor=lambda n: (n - 1) / n,
    ),
    Collective(
        "all-to-all",
        "device i sends its part j to device j: a transpose over devices (experts, Ulysses)",
        run=lambda x, axis, n: lax.all_to_all(x.reshape(n, -1), axis, 0, 0).reshape(-1),
        expected=lambda value, n, own, part, i: value(i // part, own * part + i % part),
        bus_factor=lambda n: (n - 1) / n,
    ),
    Collective(
        "permute",
        "device i sends its array to device i + 1, the last one to device 0 (pipelines, rings)",
        run=lambda x, axis, n: lax.ppermute(x, axis, [(i, (i + 1) % n) for i in range(n)]),
        expected=lambda value, n, own, part, i: value((own - 1) % n, i),
        bus_factor=lambda n: 1.0,
    ),
)


@dataclass(frozen=True)
class Measurement:
    """One collective over one mesh axis, with arrays of one size."""

    collective: str
    axis: str
    n: int
    """Devices of the axis."""
    bytes: int
    """Size of a device's array before or after: the larger of the two."""
    seconds: float | None
    """From one call to the next, of the slowest process; None if it failed."""
    bus_bandwidth: float | None
    """Bytes/s."""
    error: str | None = None
    """Problem of the first process that found one."""


def bus_bandwidth(collective: Collective, n: int, n_bytes: int, seconds: float) -> float:
    """Return the bytes/s that each device's link carries, comparable with a data sheet for any n.

    Defined as in NVIDIA's nccl-tests, for the larger of input and output:
    https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md, and for scatter and permute
    (sendrecv) src/scatter.cu and src/sendrecv.cu beside it.
    """
    return n_bytes / seconds * collective.bus_factor(n)


def measure_axis(
    mesh: Mesh,
    axis: str,
    cluster: ProcessGroup,
    allowed: float,
    set_activity: Callable[[str], None],
    collectives: Iterable[Collective] = COLLECTIVES,
) -> list[Measurement]:
    """Check and time all collectives over one axis, from small arrays to large ones.

    Args:
        allowed: seconds for all of it; larger sizes are left out when they are over.
        set_activity: is called with a description of each measurement before it begins.
    """
    out: list[Measurement] = []
    left = list(collectives)
    n, began, elapsed = mesh.shape[axis], time.monotonic(), 0.0
    for size in SIZES:
        for collective in tuple(left):
            if elapsed > allowed and size > SIZES[0]:
                return out
            activity = f"{collective.name} over {axis}, {format_bytes(size)}"
            set_activity(activity)
            found, error = catch_error(activity, cluster, measure, mesh, axis, collective, size)
            seconds, mistake = found or (None, "")
            # What one process decided alone would leave the others waiting for it.
            all_found = cluster.allgather([seconds, error or mistake, time.monotonic() - began])
            elapsed = all_found[0][2]
            error = first_error([error for _, error, _ in all_found])
            seconds = None if error else max(s for s, _, _ in all_found)
            bandwidth = bus_bandwidth(collective, n, size, seconds) if seconds else None
            out.append(Measurement(collective.name, axis, n, size, seconds, bandwidth, error))
            if error or _is_slow(seconds, size):
                left.remove(collective)
    return out


def _is_slow(seconds: float, size: int) -> bool:
    """Return whether the next size would take too long; small arrays take as long as each other."""
    larger = [s for s in SIZES if s > size]
    if not larger:
        return False
    growth = larger[0] / size if size >= 2**20 else 1
    return seconds * growth * (1 + REPETITIONS[larger[0]]) > MAX_SECONDS


def catch_error(
    activity: str, cluster: ProcessGroup, function: Callable[..., T], *arguments: Any
) -> tuple[T | None, str]:
    """Return a function's result and an empty string; or None and the exception that it raised.

    The exception is printed at once, too: processes that did not fail may wait for this one for
    ever.
    """
    try:
        return function(*arguments), ""
    except Exception as error:  # of XLA, NCCL or Gloo: whatever it is, it belongs in the report
        text = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        print(f"process {cluster.rank}: {activity}: {text}", file=sys.stderr, flush=True)
        return None, text


def first_error(errors: Sequence[str]) -> str | None:
    """Return the error of the first process that has one, with its rank."""
    return next((f"process {rank}: {error}" for rank, error in enumerate(errors) if error), None)


def measure(mesh: Mesh, axis: str, collective: Collective, size: int) -> tuple[float, str]:
    """Return the seconds of one call on this process, and a mistake in its result, if any.

    Args:
        size: bytes of an array, rounded up to what the devices of the axis can share out.
    """
    n = mesh.shape[axis]
    part = -(-size // (4 * n))
    place = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    length = part if collective.from_parts else part * n

    def own_rows(index: tuple[slice, ...]) -> np.ndarray:
        period = pattern(np.arange(mesh.size)[index[0], None], np.arange(PERIOD))
        return np.stack([np.resize(row, length) for row in period])

    x = jax.make_array_from_callback((mesh.size, length), place, own_rows)

    def local(x: jax.Array) -> jax.Array:
        return collective.run(x[0], axis, n)[None]

    run = jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=place.spec, out_specs=place.spec, check_vma=False)
    )
    result = run(x).block_until_ready()
    error = first_mistake(mesh, axis, collective, part, result)
    repetitions = REPETITIONS.get(size, 3)
    run(x).block_until_ready()
    began = time.perf_counter()
    for _ in range(repetitions):
        result = run(x)
    result.block_until_ready()
    return (time.perf_counter() - began) / repetitions, error


def pattern(device: np.ndarray | int, position: np.ndarray) -> np.ndarray:
    """Return a device's input: small whole numbers, whose sums are exact in any order."""
    return ((37 * device + position) % PERIOD).astype(np.float32)


def first_mistake(
    mesh: Mesh, axis: str, collective: Collective, part: int, result: jax.Array
) -> str:
    """Return where this process's part of a result differs from NumPy's; empty if nowhere.

    Large results are compared at places spread over all of them.
    """
    numbers = np.arange(mesh.size).reshape(mesh.devices.shape)  # as in the first dimension of x
    along = mesh.axis_names.index(axis)
    n = mesh.shape[axis]
    for shard in result.addressable_shards:
        found = np.asarray(shard.data)[0]
        number = shard.index[0].start or 0
        where = list(np.unravel_index(number, numbers.shape))
        own = int(where[along])
        where[along] = slice(None)
        group = numbers[tuple(where)]
        positions = np.unique(np.linspace(0, found.size - 1, CHECKED).astype(np.int64))
        expected = collective.expected(
            lambda m, i, group=group: pattern(group[m], i), n, own, part, positions
        )
        wrong = np.flatnonzero(found[positions] != expected)
        if wrong.size:
            i = positions[wrong[0]]
            return (
                f"wrong result: element {i} of device {own} is {found[i]:g}, "
                f"not {expected[wrong[0]]:g}"
            )
    return ""


def collective_checks(measurements: Sequence[Measurement], slow: float | None) -> list[Check]:
    """Return a line of the report for each collective over one axis.

    Args:
        slow: bytes/s below which the bus bandwidth of an all-reduce is suspicious; None if that
            is not known.
    """
    return [
        _evaluate(collective, [m for m in measurements if m.collective == collective.name], slow)
        for collective in COLLECTIVES
    ]


def _evaluate(
    collective: Collective, measurements: Sequence[Measurement], slow: float | None
) -> Check:
    first, last = measurements[0], measurements[-1]
    name = f"{collective.name} over {last.axis}"
    if last.error:
        return fail(
            name,
            f"at {format_bytes(last.bytes)}, {last.error}",
            "run again with NCCL_DEBUG=INFO (GPUs) or TF_CPP_MIN_LOG_LEVEL=0; with fewer hosts it "
            "shows which of them is to blame",
        )
    finding = (
        f"{collective.meaning}; result right, {milliseconds(first.seconds)} at "
        f"{format_bytes(first.bytes)}, {gigabytes(last.bus_bandwidth)} GB/s at "
        f"{format_bytes(last.bytes)}"
    )
    is_large = last.bytes >= 2**24
    if collective.name == "all-reduce" and slow and is_large and last.bus_bandwidth < slow:
        return warn(
            name,
            f"{finding}: under {gigabytes(slow)} GB/s, a tenth of the data sheet",
            "run again with NCCL_DEBUG=INFO, which names the network in use: it should not be "
            "sockets; load the machine's NCCL network plugin",
        )
    return ok(name, finding)


def milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"


def gigabytes(per_second: float) -> str:
    """Return bytes/s in GB/s."""
    return f"{per_second / 1e9:.3g}" if per_second >= 1e6 else "<0.001"
