"""The size of an optimizer's state, and the shardings of its arrays."""

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


def n_moments(config: OptimizerConfig) -> int:
    """Return how many arrays of a matrix's size the optimizer keeps for each matrix of a layer."""
    matrix = Weight("layers/matrix", (1, 256, 256), ("layers", "embed", "mlp"), "matrix", 1)
    optimizer = make_optimizer(config, Parameters({"layers": {"matrix": matrix}}))
    shape = jax.ShapeDtypeStruct(matrix.shape, "float32")
    state = jax.eval_shape(optimizer.init, {"layers": {"matrix": shape}})
    return sum(leaf.size for leaf in jax.tree.leaves(state)) // matrix.size


def opt_state_shardings(
    optimizer: optax.GradientTransformation, params: Params, shardings: Params, mesh: Mesh
) -> Any:
    """Return the `NamedSharding` of every array of the optimizer's state.

    An array under the path of a parameter, of which `params` has the shapes, lies as `shardings`
    has it for that parameter, and whole in a dim that has another size; all else, such as a count,
    is on every device.
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
