"""Table of optimizers, used to check `optimizer.name` and its keys before JAX starts."""

import importlib
from typing import TYPE_CHECKING

from jaxgpt.config import OptimizerConfig, UsageError

if TYPE_CHECKING:
    import optax

    from jaxgpt.optim.parameters import Parameters

# Maps each optimizer to the `optimizer` keys that it uses, except weight_decay, grad_clip and the
# learning-rate keys, which all optimizers use. The optimizer NAME is the function NAME in NAME.py.
OPTIMIZERS: dict[str, tuple[str, ...]] = {
    "adamw": ("beta1", "beta2", "eps"),
    "lion": ("beta1", "beta2"),
    "muon": ("beta1", "beta2", "eps", "momentum", "adamw_learning_rate"),
    "adafactor": (),
    "sgd": ("momentum",),
}
CHOICES = {"optimizer.name": OPTIMIZERS}  # for `parse_args`


def make_optimizer(
    config: OptimizerConfig, parameters: "Parameters"
) -> "optax.GradientTransformation":
    """Return the optimizer that `optimizer.name` selects, without the learning rate.

    Its `update(gradients, state, params)` returns a direction and the new state. README.md explains
    how the training step uses the direction. Raises `UsageError` if optimizer.name is unknown.
    """
    if config.name not in OPTIMIZERS:
        raise UsageError(f"optimizer.name={config.name}: must be one of {', '.join(OPTIMIZERS)}")
    module = importlib.import_module(f"jaxgpt.optim.{config.name}")
    return getattr(module, config.name)(config, parameters)
