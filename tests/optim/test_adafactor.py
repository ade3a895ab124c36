import jax
import numpy as np
import optax
import pytest

from arrays import random_like
from jaxgpt.config import ModelConfig, OptimizerConfig
from jaxgpt.models.weights import Weight, weights
from jaxgpt.optim import make_optimizer
from jaxgpt.optim.adafactor import is_factored
from jaxgpt.optim.parameters import Parameters

# Every matrix has 128 rows and columns; queries, keys and values are three.
MODEL = ModelConfig(vocab_size=200, n_embd=128, n_layer=2, n_head=4, block_size=32, bias=True)
CONFIG = OptimizerConfig(name="adafactor", weight_decay=0.0)


def single_arrays(tree):
    """Return the arrays of a stack by name and index, each matrix as a 2D array."""
    out = {}
    for path, x in jax.tree.leaves_with_path(tree):
        name, x = jax.tree_util.keystr(path, simple=True, separator="/"), np.asarray(x)
        if "/qkv/kernel" in name:
            x = np.moveaxis(x, 2, 1).reshape(-1, 128, 128)
        elif "/out/kernel" in name:
            x = x.reshape(-1, 128, 128)
        elif "/qkv/bias" in name:
            x = x.reshape(-1, 128)
        elif not name.startswith("layers/"):
            x = x[None]
        out |= {f"{name} {i}": one for i, one in enumerate(x)}
    return out


def test_updates_of_each_matrix_are_optaxs():
    parameters = Parameters(weights(MODEL))
    ours, reference = make_optimizer(CONFIG, parameters), optax.adafactor(1e-2)
    params = random_like(parameters.weights, 0, scale=0.02)
    state, expected_state = ours.init(params), reference.init(single_arrays(params))
    for step in range(1, 6):
        gradients = random_like(parameters.weights, step, scale=10.0 ** (step - 3))
        directions, state = ours.update(gradients, state, params)
        expected, expected_state = reference.update(
            single_arrays(gradients), expected_state, single_arrays(params)
        )
        found = single_arrays(directions)
        assert found.keys() == expected.keys()
        for name, direction in found.items():
            np.testing.assert_allclose(
                -1e-2 * direction, expected[name], rtol=2e-5, atol=1e-12, err_msg=name
            )
        params = jax.tree.map(lambda p, d: p - 1e-2 * d, params, directions)


def test_embeddings_and_matrices_that_are_large_enough_are_factored():
    named = {w.name: is_factored(w) for w in jax.tree.leaves(weights(MODEL))}
    assert {name for name, factored in named.items() if factored} == {
        "token_embedding/embedding", "layers/attention/qkv/kernel", "layers/attention/out/kernel",
        "layers/mlp/up/kernel", "layers/mlp/down/kernel",
    }  # fmt: skip


@pytest.mark.parametrize("gradient", [0.0, 1e-25, 1e4])
def test_a_gradient_of_any_size_has_a_finite_direction(gradient):
    """Embedding rows of tokens that are in no batch have zero gradients."""
    parameters = Parameters(weights(MODEL))
    optimizer = make_optimizer(CONFIG, parameters)
    params = random_like(parameters.weights, 0)
    gradients = jax.tree.map(lambda p: np.full_like(p, gradient), params)
    gradients["token_embedding"]["embedding"][5:] = 0
    directions, _ = optimizer.update(gradients, optimizer.init(params), params)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(directions))
    assert (np.asarray(directions["token_embedding"]["embedding"])[5:] == 0).all()


def test_what_fills_up_a_vocabulary_changes_nothing():
    """Padding rows do not count in the RMS that scales an update."""
    config = OptimizerConfig(name="adafactor", weight_decay=0.0)
    draw = np.random.default_rng(0).normal
    table, gradient = draw(size=(2, 129, 8)).astype(np.float32)
    found = []
    for padding in (0, 127):
        rows = ((0, padding), (0, 0))
        weight = Weight(
            "t/embedding", (129 + padding, 8), ("vocab", "embed"), "token_embedding", 1, padding
        )
        params, grads = {"t": np.pad(table, rows)}, {"t": np.pad(gradient, rows)}
        optimizer = make_optimizer(config, Parameters({"t": weight}))
        found.append(optimizer.update(grads, optimizer.init(params), params)[0]["t"][:129])
    np.testing.assert_allclose(*found, rtol=1e-5)
