"""Optimizers: optax transformations without the learning rate, by name."""

from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.sharding import Mesh, NamedSharding

from jaxgpt.config import OptimizerConfig, UsageError
from jaxgpt.optim.adamw import adamw
from jaxgpt.optim.schedule import learning_rate_schedule
from jaxgpt.parallel.sharding import replicated

__all__ = ["OPTIMIZERS", "learning_rate_schedule", "make_optimizer", "opt_state_shardings"]

# (optimizer config, tree of booleans: which parameters decay) -> gradients to the direction that
# the learning rate multiplies and the step subtracts.
OPTIMIZERS: dict[str, Callable[[OptimizerConfig, Any], optax.GradientTransformation]] = {
    "adamw": adamw,
}


def make_optimizer(config: OptimizerConfig, is_decayed: Any) -> optax.GradientTransformation:
    """Return the optimizer that `optimizer.name` asks for.

    The learning rate is not part of it: it follows the step, which a skipped step advances, and
    not the count of updates, which it does not. `is_decayed` is a tree of booleans like the
    parameters'. `UsageError` if there is no optimizer of that name.
    """
    if config.name not in OPTIMIZERS:
        raise UsageError(f"optimizer.name={config.name}: must be one of {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[config.name](config, is_decayed)


def opt_state_shardings(
    optimizer: optax.GradientTransformation, params: Any, shardings: Any, mesh: Mesh
) -> Any:
    """Return the `NamedSharding` of every array of the optimizer's state.

    What is shaped like a parameter, of which `params` has the shapes, lies as `shardings` has it
    for that parameter; counters are on every device.
    """
    whole: NamedSharding = replicated(mesh)
    return optax.tree.map_params(
        optimizer,
        lambda _, sharding: sharding,
        jax.eval_shape(optimizer.init, params),
        shardings,
        transform_non_params=lambda _: whole,
    )
