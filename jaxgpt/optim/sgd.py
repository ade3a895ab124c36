"""SGD with momentum and decoupled weight decay: SGDW (arXiv 1711.05101, algorithm 1)."""

import optax

from jaxgpt.config import OptimizerConfig
from jaxgpt.optim.parameters import Parameters


def sgd(config: OptimizerConfig, parameters: Parameters) -> optax.GradientTransformation:
    """Return SGD without the learning rate: m <- momentum m + g; without momentum, no state.

    As torch.optim.SGD without Nesterov, but that weight decay stays out of the momentum.
    """
    return optax.chain(
        optax.trace(config.momentum) if config.momentum else optax.identity(),
        optax.add_decayed_weights(config.weight_decay, parameters.is_decayed),
    )
