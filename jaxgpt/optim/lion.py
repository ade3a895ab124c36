"""Lion (arXiv 2302.06675, algorithm 2)."""

import optax

from jaxgpt.config import OptimizerConfig
from jaxgpt.optim.parameters import Parameters


def lion(config: OptimizerConfig, parameters: Parameters) -> optax.GradientTransformation:
    """Return Lion without the learning rate: the sign of an average of gradients, and decay.

    The paper takes a third to a tenth of AdamW's learning rate, and as many times its weight decay
    (section 5); beta1=0.9, beta2=0.99 are its defaults.
    """
    return optax.chain(
        optax.scale_by_lion(config.beta1, config.beta2),
        optax.add_decayed_weights(config.weight_decay, parameters.is_decayed),
    )
