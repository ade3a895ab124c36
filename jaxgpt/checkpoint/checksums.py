"""Mesh-independent checksums of arrays.

The devices compute checksums before a checkpoint is written and after it is read. A mismatch means
that the data has changed on disk or in transit.
"""

import functools
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxgpt.parallel.offload import to_device

CHUNK_ELEMENTS = 2**19  # number of hashes in memory at a time
HOST_CHUNK_ELEMENTS = 2**16  # smaller limit on the host, so that a chunk fits in a core's cache


def checksums(tree: Any) -> dict[str, int]:
    """Return the 32-bit checksum of each array in a tree, keyed by the array's path.

    A path looks like params/norm/scale. Each element's bits and position are hashed. The checksum
    is the sum of all hashes modulo 2^32, so it does not depend on the sharding. Changing a single
    element always changes the checksum. All processes must call this.

    There must be at least one array. Each array must have at least one element, a numeric dtype of
    8 to 32 bits, and a `NamedSharding`. All shardings must use the same mesh.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    sums, found = sums_by_device([array for _, array in leaves]), {}
    for number, (path, array) in enumerate(leaves):
        first = [devices[0] for devices in devices_by_part(array.sharding)]
        total = sums[first, number].sum(dtype=np.uint32)
        found[jax.tree_util.keystr(path, simple=True, separator="/")] = int(total)
    return found


def sums_by_device(arrays: Sequence[jax.Array]) -> np.ndarray:
    """Return the contribution of each device's shard to the checksum of each array.

    The result is uint32 (devices, arrays), with devices in the order of the flattened mesh. The
    arrays must satisfy the conditions of `checksums`. All processes must call this.
    """
    return np.asarray(_compiled(tuple(array.sharding for array in arrays))(arrays))


def devices_by_part(sharding: NamedSharding) -> list[list[int]]:
    """Return, for each shard, a list of the devices that hold it.

    Devices are indices into the flattened mesh. The lists are sorted by their first elements.
    """
    mesh = sharding.mesh
    splits = [name in jax.tree.leaves(tuple(sharding.spec)) for name in mesh.axis_names]
    parts = defaultdict(list)
    for place, index in enumerate(np.ndindex(*mesh.devices.shape)):
        parts[tuple(i for i, split in zip(index, splits, strict=True) if split)].append(place)
    return list(parts.values())


def part_checksum(part: np.ndarray, first: Sequence[int], shape: tuple[int, ...]) -> int:
    """Return the contribution of part of an array to the array's checksum, from 0 to 2^32 - 1.

    This runs on the host.

    Args:
        part: the part, with 32 bits per element and as many dims as the whole array.
        first: index of the part's first element in the whole array.
        shape: shape of the whole array.
    """
    along = [np.zeros(1, np.uint32)]
    for axis, (start, size) in enumerate(zip(first, part.shape, strict=True)):
        stride = math.prod(shape[axis + 1 :])
        along.append(((np.arange(start, start + size) * stride) % 2**32).astype(np.uint32))
    *leading, columns = along
    rows = functools.reduce(lambda a, b: (a[:, None] + b).ravel(), leading, np.zeros(1, np.uint32))
    elements = np.ascontiguousarray(part).view(np.uint32).reshape(rows.size, columns.size)
    at_once, total = max(1, HOST_CHUNK_ELEMENTS // max(1, columns.size)), 0
    for start in range(0, rows.size, at_once):
        chunk = slice(start, start + at_once)
        hashed = _mix(elements[chunk] + (rows[chunk, None] + columns))
        total += int(hashed.sum(dtype=np.uint64))
    return total % 2**32


@functools.lru_cache(maxsize=4)
def _compiled(shardings: tuple[NamedSharding, ...]) -> Any:
    """Return a jitted function that computes `sums_by_device` for arrays with these shardings."""
    mesh = shardings[0].mesh
    specs = [sharding.spec for sharding in shardings]
    by_device = PartitionSpec(mesh.axis_names)

    def of_arrays(arrays: list[jax.Array]) -> jax.Array:
        @jax.shard_map(mesh=mesh, in_specs=(specs,), out_specs=by_device, check_vma=False)
        def of_shards(shards: list[jax.Array]) -> jax.Array:
            sums = [
                _shard_checksum(shard, array.shape, spec)
                for shard, array, spec in zip(shards, arrays, specs, strict=True)
            ]
            return jnp.stack(sums)[None]

        return of_shards(arrays)

    return jax.jit(of_arrays, out_shardings=NamedSharding(mesh, PartitionSpec()))


@functools.partial(jax.jit, static_argnums=(1, 2))  # traced once for a parameter and its moments
def _shard_checksum(shard: jax.Array, shape: tuple[int, ...], spec: PartitionSpec) -> jax.Array:
    """Return one device's contribution to the checksum of an array (uint32 scalar).

    A shard in host memory is copied to the device chunk by chunk.
    """
    along = [jnp.zeros(1, jnp.uint32)]  # per axis: offsets in the flattened array
    for axis, size in enumerate(shard.shape):
        split = spec[axis] if axis < len(spec) else None
        first = lax.axis_index(split) * size if split else 0
        stride = math.prod(shape[axis + 1 :]) % 2**32
        along.append((jnp.arange(size, dtype=jnp.uint32) + jnp.uint32(first)) * jnp.uint32(stride))
    *leading, columns = along
    rows = functools.reduce(
        lambda a, b: (a[:, None] + b).ravel(), leading, jnp.zeros(1, jnp.uint32)
    )
    n, most = rows.size, max(1, CHUNK_ELEMENTS // columns.size)
    at_once = next(k for k in range(min(n, most), 0, -1) if n % k == 0)
    elements, rows = shard.reshape(n, columns.size), rows[:, None]
    if n == at_once:  # a scan would take longer to compile
        return _hash(to_device(elements), rows + columns).sum(dtype=jnp.uint32)

    def add(sums: jax.Array, chunk: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        elements, rows = chunk
        hashes = _hash(to_device(elements), rows + columns)
        return sums + hashes.sum(axis=0, dtype=jnp.uint32), None

    chunks = elements.reshape(-1, at_once, columns.size), rows.reshape(-1, at_once, 1)
    return lax.scan(add, jnp.zeros_like(columns), chunks)[0].sum(dtype=jnp.uint32)


def _hash(elements: jax.Array, places: jax.Array) -> jax.Array:
    """Return fmix32(bits + position) for each element (smhasher, src/MurmurHash3.cpp).

    At a given position, elements with different bits have different hashes.
    """
    unsigned = jnp.dtype(f"uint{8 * elements.dtype.itemsize}")
    return _mix(lax.bitcast_convert_type(elements, unsigned).astype(jnp.uint32) + places)


def _mix(h: Any) -> Any:
    """Return fmix32 of each element of a uint32 array (JAX or NumPy)."""
    h = (h ^ (h >> 16)) * h.dtype.type(0x85EBCA6B)
    h = (h ^ (h >> 13)) * h.dtype.type(0xC2B2AE35)
    return h ^ (h >> 16)
