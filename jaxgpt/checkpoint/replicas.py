"""Do all devices hold the same parameters? One that computes wrongly without saying so is found by
the copies that others hold, along `data` and every other axis that does not split a weight."""

import functools
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxgpt.checkpoint.checksums import shard_checksum


def devices_that_differ(params: Any) -> list[int]:
    """Return the devices, by their place in the mesh, whose part of an array is not its copies'.

    Those outvoted by the other copies of a part; where no value has the most votes, as of two
    copies, all of them. Nothing is known of a part without a copy. All processes call this
    together, and get the same answer.
    """
    arrays = jax.tree.leaves(params)
    shardings = tuple(array.sharding for array in arrays)
    sums = np.asarray(_compiled(shardings)(arrays))
    found: set[int] = set()
    for number, sharding in enumerate(shardings):
        for copies in _copies(sharding):
            votes = Counter(sums[copies, number].tolist()).most_common(2)
            if len(votes) > 1:
                tie = votes[0][1] == votes[1][1]
                found.update(c for c in copies if tie or sums[c, number] != votes[0][0])
    return sorted(found)


def has_copies(params: Any) -> bool:
    """Return whether most parameters (arrays, or their shapes with shardings) have a copy."""
    with_copy = sum(a.size for a in jax.tree.leaves(params) if len(_copies(a.sharding)[0]) > 1)
    return 2 * with_copy > sum(a.size for a in jax.tree.leaves(params))


def _copies(sharding: NamedSharding) -> Sequence[list[int]]:
    """Return for each part of an array the devices that hold it, by their place in the mesh."""
    mesh = sharding.mesh
    splits = [name in jax.tree.leaves(tuple(sharding.spec)) for name in mesh.axis_names]
    parts = defaultdict(list)
    for place, index in enumerate(np.ndindex(*mesh.devices.shape)):
        parts[tuple(i for i, split in zip(index, splits, strict=True) if split)].append(place)
    return list(parts.values())


@functools.lru_cache(maxsize=4)
def _compiled(shardings: tuple[NamedSharding, ...]) -> Any:
    """Return (arrays so sharded) -> uint32 of shape (devices, arrays), on every device."""
    mesh = shardings[0].mesh
    specs = [sharding.spec for sharding in shardings]
    by_device = PartitionSpec(mesh.axis_names)

    def of_arrays(arrays: list[jax.Array]) -> jax.Array:
        @jax.shard_map(mesh=mesh, in_specs=(specs,), out_specs=by_device, check_vma=False)
        def of_shards(shards: list[jax.Array]) -> jax.Array:
            sums = [
                shard_checksum(shard, array.shape, spec)
                for shard, array, spec in zip(shards, arrays, specs, strict=True)
            ]
            return jnp.stack(sums)[None]

        return of_shards(arrays)

    return jax.jit(of_arrays, out_shardings=NamedSharding(mesh, PartitionSpec()))
