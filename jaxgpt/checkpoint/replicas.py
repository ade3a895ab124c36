"""Detection of silent data corruption by comparing the replicas of each parameter.

A parameter has replicas along `data` and along every other mesh axis that does not shard the
parameter.
"""

from collections import Counter
from typing import Any

import jax

from jaxgpt.checkpoint.checksums import devices_by_part, sums_by_device


def devices_that_differ(params: Any) -> list[int]:
    """Return the devices whose copy of a parameter differs from the other replicas.

    For each shard, the most common checksum is considered correct, and the devices with other
    checksums are returned. If the most common checksum is not unique (for example, if there are
    only two replicas and they differ), all devices that hold the shard are returned. Shards without
    replicas are not checked.

    The arrays in `params` must satisfy the conditions of `checksums`. All processes must call this
    together and get the same result.

    Returns:
        A sorted list of indices into the flattened mesh, empty if all replicas agree.
    """
    arrays = jax.tree.leaves(params)
    sums = sums_by_device(arrays)
    found: set[int] = set()
    for number, array in enumerate(arrays):
        for copies in devices_by_part(array.sharding):
            votes = Counter(sums[copies, number].tolist()).most_common(2)
            if len(votes) > 1:
                tie = votes[0][1] == votes[1][1]
                found.update(c for c in copies if tie or sums[c, number] != votes[0][0])
    return sorted(found)


def has_replicas(params: Any) -> bool:
    """Return whether more than half of all parameter elements have replicas.

    `params` is a tree of arrays or `jax.ShapeDtypeStruct`s, each with a `NamedSharding`.
    """
    arrays = jax.tree.leaves(params)
    with_copy = [a.size for a in arrays if len(devices_by_part(a.sharding)[0]) > 1]
    return 2 * sum(with_copy) > sum(a.size for a in arrays)
