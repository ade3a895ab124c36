import jax
import numpy as np
import optax

from arrays import random_like
from jaxgpt.config import ModelConfig, OptimizerConfig
from jaxgpt.models.weights import weights
from jaxgpt.optim import make_optimizer
from jaxgpt.optim.parameters import Parameters

CONFIG = OptimizerConfig(name="lion", weight_decay=0.1, beta1=0.9, beta2=0.98)


def test_updates_are_optaxs():
    parameters = Parameters(weights(ModelConfig(vocab_size=65, n_embd=16, n_layer=2, bias=True)))
    ours = make_optimizer(CONFIG, parameters)
    reference = optax.lion(1e-3, 0.9, 0.98, weight_decay=0.1, mask=parameters.is_decayed)
    params = random_like(parameters.weights, 0)
    states = ours.init(params), reference.init(params)
    for step in range(1, 6):
        gradients = random_like(parameters.weights, step)
        directions, first = ours.update(gradients, states[0], params)
        expected, second = reference.update(gradients, states[1], params)
        states = first, second
        for a, b in zip(*map(jax.tree.leaves, (directions, expected)), strict=True):
            np.testing.assert_allclose(-1e-3 * np.asarray(a), b, rtol=1e-6)
        params = optax.apply_updates(params, expected)
