"""Size and shardings of the optimizer state."""

from typing import Any

import jax
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import tree_leaves_with_path, tree_map_with_path

from jaxgpt.config import OptimizerConfig
from jaxgpt.models.weights import Weight
from jaxgpt.optim import make_optimizer
from jaxgpt.optim.parameters import Parameters
from jaxgpt.parallel.sharding import Params, replicated


def n_moments(config: OptimizerConfig, for_embedding: bool = False) -> int:
    """Return the number of moments that the optimizer keeps for a large matrix in a layer.

    If `for_embedding` is True, return the number for the token embedding instead. Muon keeps more
    moments for it. A moment has the size of the matrix, so Adafactor's row and column means do not
    count.
    """
    matrix = Weight("matrix", (1, 256, 256), ("layers", "embed", "mlp"), "matrix", 1)
    if for_embedding:
        matrix = Weight("matrix", (256, 256), ("vocab", "embed"), "token_embedding", 1)
    optimizer = make_optimizer(config, Parameters({"matrix": matrix}))
    shape = jax.ShapeDtypeStruct(matrix.shape, "float32")
    state = jax.eval_shape(optimizer.init, {"matrix": shape})
    return sum(leaf.size for leaf in jax.tree.leaves(state)) // matrix.size


def opt_state_shardings(
    optimizer: optax.GradientTransformation, params: Params, shardings: Params, mesh: Mesh
) -> Any:
    """Return the `NamedSharding` of every array in the optimizer state.

    An array belongs to a parameter if its path ends with the parameter's path and both have the
    same number of dimensions. It gets the sharding of that parameter's moments, but dimensions
    whose size differs from the parameter's are not sharded. All other arrays, such as an update
    count, are replicated.

    Args:
        params: the parameters, or their shapes.
        shardings: `NamedSharding` of each parameter's moments, with an entry for each dimension.
    """
    whole = replicated(mesh)
    leaves = tree_leaves_with_path(params)
    known = {
        path: (leaf.shape, sharding)
        for (path, leaf), sharding in zip(leaves, jax.tree.leaves(shardings), strict=True)
    }

    def place(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        for start in range(len(path)):
            shape, sharding = known.get(path[start:], ((), whole))
            if leaf.shape and len(shape) == len(leaf.shape):
                axes = zip(sharding.spec, leaf.shape, shape, strict=True)
                spec = PartitionSpec(*(axis if n == m else None for axis, n, m in axes))
                return NamedSharding(mesh, spec, memory_kind=sharding.memory_kind)
        return whole

    return tree_map_with_path(place, jax.eval_shape(optimizer.init, params))
