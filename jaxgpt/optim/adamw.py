"""AdamW (arXiv 1711.05101, algorithm 2)."""

import optax

from jaxgpt.config import OptimizerConfig
from jaxgpt.optim.parameters import Parameters


def adamw(config: OptimizerConfig, parameters: Parameters) -> optax.GradientTransformation:
    """Return AdamW with decoupled weight decay; the caller applies the learning rate."""
    return optax.chain(
        optax.scale_by_adam(config.beta1, config.beta2, config.eps),
        optax.add_decayed_weights(config.weight_decay, parameters.is_decayed),
    )
