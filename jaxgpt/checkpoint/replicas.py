"""Do all devices hold the same parameters? One that computes wrongly without saying so is found by
the copies that others hold, along `data` and every other axis that does not split a weight."""

from collections import Counter
from typing import Any

import jax

from jaxgpt.checkpoint.checksums import devices_by_part, sums_by_device


def devices_that_differ(params: Any) -> list[int]:
    """Return the devices, by their place in the mesh, whose part of an array is not its copies'.

    Those outvoted by the other copies of a part; where no value has the most votes, as of two
    copies, all of them. Nothing is known of a part without a copy. All processes call this
    together, and get the same answer.
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


def has_copies(params: Any) -> bool:
    """Return whether most parameters (arrays, or their shapes with shardings) have a copy."""
    arrays = jax.tree.leaves(params)
    with_copy = [a.size for a in arrays if len(devices_by_part(a.sharding)[0]) > 1]
    return 2 * sum(with_copy) > sum(a.size for a in arrays)
