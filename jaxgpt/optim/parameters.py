"""Descriptions of the parameters that an optimizer receives."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh

from jaxgpt.models.weights import Weight
from jaxgpt.parallel.sharding import Params


@dataclass(frozen=True)
class Parameters:
    """Descriptions of the parameters that an optimizer updates, as trees of the same structure."""

    weights: Params  # a `Weight` for each parameter
    shardings: Params | None = None
    """`NamedSharding` of each parameter's gradient and moments. None if they are not sharded, or if
    only the optimizer's `init` is called."""

    @property
    def is_decayed(self) -> Params:
        """Tree of booleans: whether weight decay applies to each parameter."""
        return jax.tree.map(lambda w: w.is_decayed, self.weights)

    @property
    def mesh(self) -> Mesh | None:
        """The mesh of the shardings; None if there are no shardings."""
        return next((one.mesh for one in jax.tree.leaves(self.shardings)), None)

    def where(self, is_chosen: Callable[[Weight], bool]) -> "Parameters":
        """Return the parameters whose `Weight` satisfies `is_chosen`."""
        flat = flatten_dict(self.weights)
        chosen = unflatten_dict({path: w for path, w in flat.items() if is_chosen(w)})
        return Parameters(chosen, self.shardings and select(self.shardings, chosen))


def select(tree: Params, part: Params) -> Params:
    """Return a nested dict with the leaves of `tree` at the paths in `part`.

    `tree` must have a leaf at each of these paths.
    """
    flat = flatten_dict(tree)
    return unflatten_dict({path: flat[path] for path in flatten_dict(part)})


def merge(*parts: Params) -> Params:
    """Merge nested dicts, which must not have a path in common."""
    return unflatten_dict({path: x for part in parts for path, x in flatten_dict(part).items()})
