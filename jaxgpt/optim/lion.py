"""Lion (arXiv 2302.06675, algorithm 2)."""

import optax

from jaxgpt.config import OptimizerConfig
from jaxgpt.optim.parameters import Parameters


def lion(config: OptimizerConfig, parameters: Parameters) -> optax.GradientTransformation:
    """Return Lion with decoupled weight decay; the caller applies the learning rate.

    The direction is the sign of a moving average, plus the weight decay. The paper (section 5)
    recommends a third to a tenth of AdamW's learning rate and 3 to 10 times AdamW's weight decay.
    The paper's defaults are beta1=0.9 and beta2=0.99.
    """
    return optax.chain(
        optax.scale_by_lion(config.beta1, config.beta2),
        optax.add_decayed_weights(config.weight_decay, parameters.is_decayed),
    )
