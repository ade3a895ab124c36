"""Optimizers: optax transformations without the learning rate, by name."""

from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import tree_leaves_with_path, tree_map_with_path

from jaxgpt.config import OptimizerConfig, UsageError
from jaxgpt.optim.adafactor import adafactor
from jaxgpt.optim.adamw import adamw
from jaxgpt.optim.lion import lion
from jaxgpt.optim.muon import is_hidden_matrix, muon
from jaxgpt.optim.newton_schulz import newton_schulz_flops
from jaxgpt.optim.parameters import Parameters
from jaxgpt.optim.schedule import learning_rate_schedule
from jaxgpt.optim.sgd import sgd
from jaxgpt.parallel.sharding import Params, replicated

__all__ = [
    "OPTIMIZERS",
    "Parameters",
    "learning_rate_schedule",
    "make_optimizer",
    "opt_state_shardings",
    "update_flops",
]

# (optimizer config, parameters) -> transformation of gradients to the direction that the learning
# rate multiplies and the step subtracts.
OPTIMIZERS: dict[str, Callable[[OptimizerConfig, Parameters], optax.GradientTransformation]] = {
    "adamw": adamw,
    "lion": lion,
    "muon": muon,
    "adafactor": adafactor,
    "sgd": sgd,
}


def make_optimizer(config: OptimizerConfig, parameters: Parameters) -> optax.GradientTransformation:
    """Return the optimizer that `optimizer.name` asks for.

    The learning rate is not part of it: it follows the step, which a skipped step advances, and
    not the count of updates, which it does not. `UsageError` if there is no optimizer of that name.
    """
    if config.name not in OPTIMIZERS:
        raise UsageError(f"optimizer.name={config.name}: must be one of {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[config.name](config, parameters)


def update_flops(config: OptimizerConfig, parameters: Parameters) -> int:
    """Return the FLOPs of matrix products in an update on each device: only Muon has any."""
    if config.name != "muon":
        return 0
    return newton_schulz_flops(parameters.where(is_hidden_matrix))


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
