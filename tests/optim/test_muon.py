"""Muon equals a NumPy version of Keller Jordan's reference, and its AdamW part equals optax."""

import jax
import numpy as np
import optax
import pytest

from arrays import random_like
from jaxgpt.config import ModelConfig, OptimizerConfig
from jaxgpt.models.weights import weights
from jaxgpt.optim import make_optimizer
from jaxgpt.optim.muon import is_hidden_matrix
from jaxgpt.optim.parameters import Parameters

MODEL = ModelConfig(vocab_size=65, n_embd=16, n_layer=2, n_head=2, block_size=8, bias=True)
PARAMETERS = Parameters(weights(MODEL))


def orthogonal(g):
    """zeropower_via_newtonschulz5 of github.com/KellerJordan/Muon, in float64."""
    x = g.T if g.shape[0] > g.shape[1] else g
    x = x / (np.linalg.norm(x) + 1e-7)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if g.shape[0] > g.shape[1] else x


def update_of(g, momentum, beta):
    """Return Keller Jordan's update of a matrix (outputs x inputs), with Moonlight's scale."""
    momentum[:] = beta * momentum + (1 - beta) * g
    nesterov = (1 - beta) * g + beta * momentum
    return orthogonal(nesterov) * 0.2 * np.sqrt(max(g.shape))


def hidden_matrices(params):
    """Yield a view of each matrix in the layers in PyTorch's layout, outputs x inputs."""
    layers = params["layers"]
    for layer in range(2):
        for part in range(3):
            yield layers["attention"]["qkv"]["kernel"][layer, :, part].reshape(16, 16).T
        yield layers["attention"]["out"]["kernel"][layer].reshape(16, 16).T
        yield layers["mlp"]["up"]["kernel"][layer].T
        yield layers["mlp"]["down"]["kernel"][layer].T


def in_float64(tree):
    return jax.tree.map(lambda x: np.array(x, np.float64), tree)


@pytest.mark.parametrize("adamw_learning_rate", [None, 3e-3])
def test_twenty_updates_are_the_references(adamw_learning_rate):
    lr, beta, decay = 0.01, 0.9, 0.1
    config = OptimizerConfig(
        name="muon", learning_rate=lr, momentum=beta, weight_decay=decay, beta2=0.95,
        adamw_learning_rate=adamw_learning_rate,
    )  # fmt: skip
    ours = make_optimizer(config, PARAMETERS)
    adamw = optax.adamw(
        adamw_learning_rate or lr, 0.9, 0.95, weight_decay=decay, mask=PARAMETERS.is_decayed
    )
    update, expected_update = jax.jit(ours.update), jax.jit(adamw.update)
    params = random_like(PARAMETERS.weights, 0, scale=0.1)
    expected = in_float64(params)
    state, adamw_state = ours.init(params), adamw.init(params)
    momenta = [np.zeros(m.shape) for m in hidden_matrices(expected)]
    for step in range(1, 21):
        gradients = random_like(PARAMETERS.weights, step)
        directions, state = update(gradients, state, params)
        params = jax.tree.map(lambda p, d: p - lr * d, params, directions)

        updates, adamw_state = expected_update(gradients, adamw_state, expected)
        new = jax.tree.map(lambda p, u: p + np.array(u, np.float64), expected, updates)
        of_each = zip(
            hidden_matrices(new), hidden_matrices(expected),
            hidden_matrices(in_float64(gradients)), momenta, strict=True,
        )  # fmt: skip
        for after, before, g, momentum in of_each:
            after[:] = before - lr * (update_of(g, momentum, beta) + decay * before)
        expected = new
    for found, wanted in zip(*map(jax.tree.leaves, (params, expected)), strict=True):
        assert np.linalg.norm(found - wanted) <= 1e-4 * np.linalg.norm(wanted)


def test_it_takes_the_matrices_of_the_layers_and_no_others():
    named = {w.name: is_hidden_matrix(w) for w in jax.tree.leaves(PARAMETERS.weights)}
    assert {name for name, hidden in named.items() if hidden} == {
        "layers/attention/qkv/kernel", "layers/attention/out/kernel", "layers/mlp/up/kernel",
        "layers/mlp/down/kernel",
    }  # fmt: skip


def test_an_update_is_as_large_as_adamws():
    """With Moonlight's scale, elements have an RMS of about 0.2 for any shape of the matrix."""
    parameters = Parameters(weights(ModelConfig(vocab_size=65, n_embd=128, n_layer=1)))
    optimizer = make_optimizer(OptimizerConfig(name="muon", weight_decay=0.0), parameters)
    gradients = random_like(parameters.weights, 0, scale=1e-4)
    directions, _ = optimizer.update(gradients, optimizer.init(gradients), gradients)
    for kernel in (directions["layers"]["attention"]["qkv"], directions["layers"]["mlp"]["down"]):
        assert np.sqrt(np.mean(np.square(kernel["kernel"]))) == pytest.approx(0.2, rel=0.2)
