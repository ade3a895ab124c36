"""SGDW: SGD with momentum and decoupled weight decay (arXiv 1711.05101, algorithm 1)."""

import optax

from jaxgpt.config import OptimizerConfig
from jaxgpt.optim.parameters import Parameters


def sgd(config: OptimizerConfig, parameters: Parameters) -> optax.GradientTransformation:
    """Return SGD with decoupled weight decay; the caller applies the learning rate.

    The momentum buffer is updated by m <- momentum * m + g, and the direction is m plus the weight
    decay. If the momentum is 0, the optimizer has no state. Without weight decay, the updates equal
    those of torch.optim.SGD with nesterov=False.
    """
    return optax.chain(
        optax.trace(config.momentum) if config.momentum else optax.identity(),
        optax.add_decayed_weights(config.weight_decay, parameters.is_decayed),
    )
