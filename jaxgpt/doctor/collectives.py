"""What devices can do together: eight collectives, each explained, checked and timed.

Every device of a mesh axis takes part; groups along the other axes do the same at the same time,
as in training.
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
from jaxgpt.doctor.checks import Check
from jaxgpt.parallel.collectives import reduce_scatter

T = TypeVar("T")

# Bytes of an array -> how often the time of it is taken.
REPETITIONS = {2**10: 20, 2**15: 20, 2**20: 10, 2**24: 3, 2**26: 3}
SIZES = tuple(REPETITIONS)
LONGEST = 5.0  # seconds: a larger size that would take longer than this is left out
PERIOD = 1009  # elements after which the pattern in the arrays repeats
CHECKED = 4096  # elements of a result that are compared with what they should be

# (values of device m at positions i, number of devices, own number, length of a part, positions)
Value = Callable[[np.ndarray | int, np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Collective:
    """One way for n devices to exchange arrays. Device 0 is the root, where there is one."""

    name: str
    meaning: str
    """What it does, in a line for someone who has not met it."""
    run: Callable[[jax.Array, str, int], jax.Array]
    """(array of one device, mesh axis, n) -> array of one device, inside `jax.shard_map`."""
    expected: Callable[[Value, int, int, int, np.ndarray], np.ndarray]
    """(value, n, own number, part, positions) -> the result there, by NumPy. `value(m, i)` is
    element i of what device m put in; `part` is the length of one of n parts of an array."""
    bus_factor: Callable[[int], float]
    """n -> bus bandwidth / (bytes / time); see `bus_bandwidth`."""
    from_parts: bool = False
    """Whether each device puts in only one of n parts."""


def _from_root(x: jax.Array, axis: str) -> jax.Array:
    return jnp.where(lax.axis_index(axis) == 0, x, 0)


def _reduce(x: jax.Array, axis: str, n: int) -> jax.Array:
    return jnp.where(lax.axis_index(axis) == 0, lax.psum(x, axis), x)


def _reduce_scatter(x: jax.Array, axis: str, n: int) -> jax.Array:
    return reduce_scatter(x, axis, 0)


def _all_to_all(x: jax.Array, axis: str, n: int) -> jax.Array:
    return lax.all_to_all(x.reshape(n, -1), axis, 0, 0).reshape(-1)


def _permute(x: jax.Array, axis: str, n: int) -> jax.Array:
    return lax.ppermute(x, axis, [(i, (i + 1) % n) for i in range(n)])


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
        run=_reduce,
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
        run=_reduce_scatter,
        expected=lambda value, n, own, part, i: _sum(value, n, own * part + i),
        bus_factor=lambda n: (n - 1) / n,
    ),
    Collective(
        "scatter",
        "device i gets part i of device 0's array (here a reduce-scatter in which the others "
        "are 0)",
        run=lambda x, axis, n: _reduce_scatter(_from_root(x, axis), axis, n),
        expected=lambda value, n, own, part, i: value(0, own * part + i),
        bus_factor=lambda n: (n - 1) / n,
    ),
    Collective(
        "all-to-all",
        "device i sends its part j to device j: a transpose over devices (experts, Ulysses)",
        run=_all_to_all,
        expected=lambda value, n, own, part, i: value(i // part, own * part + i % part),
        bus_factor=lambda n: (n - 1) / n,
    ),
    Collective(
        "permute",
        "device i sends its array to device i + 1, the last one to device 0 (pipelines, rings)",
        run=_permute,
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
    """Of the array that a device has before or after: the larger of the two."""
    seconds: float | None
    """From one call to the next, of the slowest process; None if it failed."""
    bus_bandwidth: float | None
    """Bytes/s."""
    error: str | None = None
    """What was wrong, on the first process that found something."""


def bus_bandwidth(collective: Collective, n: int, n_bytes: int, seconds: float) -> float:
    """What each device's link must carry, in bytes/s: comparable with a data sheet for any n.

    It is the number of NVIDIA's nccl-tests, by the same factors, of the array that is the larger
    of input and output: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md, and
    for scatter and permute (sendrecv) src/scatter.cu and src/sendrecv.cu beside it.
    """
    return n_bytes / seconds * collective.bus_factor(n)


def measure_axis(
    mesh: Mesh,
    axis: str,
    cluster: ProcessGroup,
    allowed: float,
    doing: Callable[[str], None],
    collectives: Iterable[Collective] = COLLECTIVES,
) -> list[Measurement]:
    """Checks and times all collectives over one axis, from small arrays to large ones.

    Args:
        allowed: seconds for all of it; larger sizes are left out when they are over.
        doing: is told what comes next.
    """
    out: list[Measurement] = []
    going_on = list(collectives)
    n, began, elapsed = mesh.shape[axis], time.monotonic(), 0.0
    for size in SIZES:
        for collective in tuple(going_on):
            if elapsed > allowed and size > SIZES[0]:
                return out
            what = f"{collective.name} over {axis}, {size_name(size)}"
            doing(what)
            measured, error = tried(what, cluster.rank, measure, mesh, axis, collective, size)
            seconds, mistake = measured or (None, "")
            # What one process decided alone would leave the others waiting for it.
            everyone = cluster.allgather([seconds, error or mistake, time.monotonic() - began])
            elapsed = everyone[0][2]
            error = next((f"process {r}: {e}" for r, (_, e, _) in enumerate(everyone) if e), None)
            seconds = None if error else max(s for s, _, _ in everyone)
            bandwidth = bus_bandwidth(collective, n, size, seconds) if seconds else None
            out.append(Measurement(collective.name, axis, n, size, seconds, bandwidth, error))
            if error or _grows_too_long(seconds, size):
                going_on.remove(collective)
    return out


def _grows_too_long(seconds: float, size: int) -> bool:
    """Whether the next size would take too long. Small arrays all take as long as the smallest."""
    larger = [s for s in SIZES if s > size]
    if not larger:
        return False
    growth = larger[0] / size if size >= 2**20 else 1
    return seconds * growth * (1 + REPETITIONS[larger[0]]) > LONGEST


def tried(
    what: str, rank: int, function: Callable[..., T], *arguments: Any
) -> tuple[T | None, str]:
    """What `function` returns on this process, and an empty string; or None and what it raised.

    That is printed too, at once: processes that did not fail may wait for this one for ever.
    """
    try:
        return function(*arguments), ""
    except Exception as error:  # of XLA, NCCL or Gloo: whatever it is, it belongs in the report
        text = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        print(f"process {rank}: {what}: {text}", file=sys.stderr, flush=True)
        return None, text


def measure(mesh: Mesh, axis: str, collective: Collective, size: int) -> tuple[float, str]:
    """Seconds of one call on this process, and what is wrong with its result; empty if nothing.

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
    """What a device puts in: small whole numbers, so that sums are exact in any order."""
    return ((37 * device + position) % PERIOD).astype(np.float32)


def first_mistake(
    mesh: Mesh, axis: str, collective: Collective, part: int, result: jax.Array
) -> str:
    """Where this process's part of a result is not what NumPy makes of the same arrays.

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
    """A line of the report for each collective over one axis.

    Args:
        slow: bytes/s that the bus bandwidth of an all-reduce should not be under; None if that is
            not known.
    """
    return [
        _judge(collective, [m for m in measurements if m.collective == collective.name], slow)
        for collective in COLLECTIVES
    ]


def _judge(
    collective: Collective, measurements: Sequence[Measurement], slow: float | None
) -> Check:
    last = measurements[-1]
    name = f"{collective.name} over {last.axis}"
    if last.error:
        return Check(
            name,
            "FAIL",
            f"at {size_name(last.bytes)}, {last.error}",
            "run again with NCCL_DEBUG=INFO (GPUs) or TF_CPP_MIN_LOG_LEVEL=0; with fewer hosts it "
            "shows which of them is to blame",
        )
    finding = (
        f"{collective.meaning}; result right, {milliseconds(measurements[0].seconds)} at "
        f"{size_name(measurements[0].bytes)}, {gigabytes(last.bus_bandwidth)} GB/s at "
        f"{size_name(last.bytes)}"
    )
    is_large = last.bytes >= 2**24
    if collective.name == "all-reduce" and slow and is_large and last.bus_bandwidth < slow:
        return Check(
            name,
            "WARN",
            f"{finding}: under {gigabytes(slow)} GB/s, a tenth of the data sheet",
            "run again with NCCL_DEBUG=INFO, which names the network in use: it should not be "
            "sockets; load the machine's NCCL network plugin",
        )
    return Check(name, "OK", finding)


def size_name(n_bytes: int) -> str:
    """Bytes as a person reads them: `64 MiB`."""
    return f"{n_bytes >> 20} MiB" if n_bytes >= 2**20 else f"{n_bytes >> 10} KiB"


def milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"


def gigabytes(per_second: float) -> str:
    """In GB/s."""
    return f"{per_second / 1e9:.3g}" if per_second >= 1e6 else "<0.001"
