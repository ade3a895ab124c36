"""The optimizer that the README adds as an example works."""

import jax
import numpy as np
import optax
import pytest

from arrays import random_like
from jaxgpt import optim
from jaxgpt.config import ModelConfig, OptimizerConfig
from jaxgpt.models.weights import weights
from jaxgpt.optim.parameters import Parameters
from jobs import SMALL, checkpoint_arrays, records, train_here
from readme_code import load_block, train_and_move


@pytest.fixture
def radam(monkeypatch, tmp_path):
    module = load_block("jaxgpt/optim/README.md", "jaxgpt.optim.radam", tmp_path)
    monkeypatch.setitem(optim.OPTIMIZERS, "radam", ("beta1", "beta2"))
    return module.radam


def test_it_updates_as_optax_does(radam):
    config = OptimizerConfig(weight_decay=0.1, beta1=0.9, beta2=0.9)
    parameters = Parameters(weights(ModelConfig(vocab_size=65, n_embd=16, n_layer=1)))
    params = random_like(parameters.weights, 0)
    reference, ours = optax.radam(1.0, 0.9, 0.9), radam(config, parameters)
    states = reference.init(params), ours.init(params)
    for seed in range(1, 9):
        gradients = random_like(parameters.weights, seed)
        expected, first = reference.update(gradients, states[0], params)
        found, second = ours.update(gradients, states[1], params)
        states = first, second
        for a, b, p, w in zip(
            *map(jax.tree.leaves, (found, expected, params, parameters.weights)), strict=True
        ):
            np.testing.assert_allclose(a, 0.1 * w.is_decayed * p - b, rtol=1e-5, atol=1e-6)


def test_it_trains_saves_and_moves_to_another_mesh(radam, tmp_path):
    settings = ("optimizer.name=radam", "optimizer.learning_rate=1e-3", "optimizer.warmup_iters=1")
    losses = train_and_move(train_here, records, tmp_path / "run", *SMALL, *settings)
    assert sorted(losses) == [1, 2, 3, 4, 5, 6] and losses[6] < losses[1]
    saved = checkpoint_arrays(tmp_path / "run", 6)
    moments = [path for path in saved if "opt_state" in path and ("mu" in path or "nu" in path)]
    assert len(moments) == 2 * len([path for path in saved if path.startswith("['params']")])
