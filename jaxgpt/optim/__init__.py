"""The optimizers by name, which are checked when the command line is read."""

import importlib
from typing import TYPE_CHECKING

from jaxgpt.config import OptimizerConfig, UsageError

if TYPE_CHECKING:
    import optax

    from jaxgpt.optim.parameters import Parameters

# Each optimizer is the function NAME of the file NAME.py. Beside its name are the keys of
# `optimizer` that it uses, except weight_decay, grad_clip and the keys of the learning rate.
OPTIMIZERS: dict[str, tuple[str, ...]] = {
    "adamw": ("beta1", "beta2"),
    "lion": ("beta1", "beta2"),
    "muon": ("beta1", "beta2", "momentum", "adamw_learning_rate"),
    "adafactor": (),
    "sgd": ("momentum",),
}
CHOICES = {"optimizer.name": OPTIMIZERS}  # for `parse_args`


def make_optimizer(
    config: OptimizerConfig, parameters: "Parameters"
) -> "optax.GradientTransformation":
    """Return the optimizer `optimizer.name`: gradients -> direction that the step subtracts.

    The learning rate, which multiplies the direction, is not part of it: it follows the number of
    the step, which a skipped step advances, and not the number of updates. `UsageError` if there
    is no optimizer of that name.
    """
    if config.name not in OPTIMIZERS:
        raise UsageError(f"optimizer.name={config.name}: must be one of {', '.join(OPTIMIZERS)}")
    module = importlib.import_module(f"jaxgpt.optim.{config.name}")
    return getattr(module, config.name)(config, parameters)
