"""The optimizer that the room's README adds."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxgpt import optim
from jaxgpt.config import OptimizerConfig
from jobs import SMALL, checkpoint_arrays, records, train_here
from readme_code import load_block, train_and_move


@pytest.fixture
def lion(monkeypatch, tmp_path):
    module = load_block("jaxgpt/optim/README.md", "lion", tmp_path)
    monkeypatch.setitem(optim.OPTIMIZERS, "lion", module.lion)
    return module.lion


def test_it_updates_as_optax_does(lion):
    config = OptimizerConfig(weight_decay=0.1, beta1=0.9, beta2=0.99)
    params = {"a": jnp.array([1.0, -2.0, 3.0]), "b": jnp.ones((2, 2))}
    reference = optax.lion(1.0, 0.9, 0.99, weight_decay=0.1)
    ours = lion(config, {"a": True, "b": True})
    states = reference.init(params), ours.init(params)
    for seed in range(3):
        keys = jax.random.split(jax.random.key(seed), 2)
        grads = {"a": jax.random.normal(keys[0], (3,)), "b": jax.random.normal(keys[1], (2, 2))}
        expected, first = reference.update(grads, states[0], params)
        found, second = ours.update(grads, states[1], params)
        states = first, second
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, -b, rtol=1e-6)


def test_it_trains_saves_and_moves_to_another_mesh(lion, tmp_path):
    settings = ("optimizer.name=lion", "optimizer.learning_rate=1e-4", "optimizer.warmup_iters=1")
    losses = train_and_move(train_here, records, tmp_path / "run", *SMALL, *settings)
    assert sorted(losses) == [1, 2, 3, 4, 5, 6] and losses[6] < losses[1]
    saved = checkpoint_arrays(tmp_path / "run", 6)
    moments = [path for path in saved if "opt_state" in path and "mu" in path]
    assert len(moments) == len([path for path in saved if path.startswith("['params']")])
    assert not any("nu" in path for path in saved if "opt_state" in path)
