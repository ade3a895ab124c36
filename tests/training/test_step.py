import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.config import load_config
from jaxgpt.distributed.mesh import make_mesh
from jaxgpt.training.step import accumulated_gradients, cross_entropy, make_steps
from jobs import trace

LAYOUTS = ["1,1,1", "8,1,1", "1,8,1", "1,1,4", "2,1,4", "2,2,2"]
ARGUMENTS = (
    "shakespeare_char_cpu",
    "data.dataset=python",
    "model.n_layer=2",
    "model.n_embd=64",
    "train.batch_size=16",
)


@pytest.fixture(scope="module")
def reference():
    return trace(20, *ARGUMENTS, "--mesh", "1,1,1", devices=1)


@pytest.mark.parametrize("mesh", LAYOUTS[1:])
def test_the_mesh_changes_nothing_but_the_layout(mesh, reference):
    n = int(np.prod([int(s) for s in mesh.split(",")]))
    found = trace(20, *ARGUMENTS, "--mesh", mesh, devices=n)
    assert found["params"] == reference["params"]
    assert found["rows"] == reference["rows"]
    np.testing.assert_allclose(found["losses"], reference["losses"], rtol=1e-4)


@pytest.mark.parametrize(
    "option",
    [
        "parallel.zero_stage=0",
        "parallel.zero_stage=1",
        "parallel.zero_stage=2",
        "parallel.scan_layers=True",
        "train.gradient_accumulation_steps=4",
    ],
)
def test_strategies_change_nothing_but_speed_and_memory(option, reference):
    found = trace(20, *ARGUMENTS, "--mesh", "2,2,2", option)
    assert found["params"] == reference["params"]
    np.testing.assert_allclose(found["losses"], reference["losses"], rtol=1e-4)


@pytest.mark.parametrize("mesh", ["2,1,4", "1,8,1", "2,2,2"])
def test_dropout_is_the_same_on_every_mesh(mesh):
    arguments = (*ARGUMENTS, "model.dropout=0.3")
    alone = trace(3, *arguments, "--mesh", "1,1,1", devices=1)
    found = trace(3, *arguments, "--mesh", mesh)
    np.testing.assert_allclose(found["losses"], alone["losses"], rtol=1e-4)


def test_no_layout_makes_xla_fight_it(capfd):
    """XLA warns of "involuntary full rematerialization" where shardings do not fit together."""
    for mesh in LAYOUTS[1:]:
        sizes = tuple(int(s) for s in mesh.split(","))
        if np.prod(sizes) != 8:
            continue
        config = load_config(*ARGUMENTS, "--mesh", mesh).replace(model__vocab_size=256)
        steps = make_steps(config, make_mesh(sizes))
        batch = jax.ShapeDtypeStruct((16, 65), jnp.int32, sharding=steps.batch_sharding)
        steps.train_step.lower(steps.state_shapes, np.int32(1), batch).compile()
    assert "rematerialization" not in capfd.readouterr().err


def test_cross_entropy_is_the_negative_log_likelihood():
    logits = np.random.default_rng(0).normal(size=(2, 3, 7)) * 3
    targets = np.array([[0, 6, 3], [2, 2, 5]])
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    expected = -np.log(np.take_along_axis(p, targets[..., None], -1))[..., 0]
    padded = np.concatenate([logits, np.full((2, 3, 2), -np.inf)], -1)
    for given in (logits, padded):
        found = cross_entropy(jnp.float32(given), jnp.array(targets))
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    gradient = jax.grad(lambda x: cross_entropy(x, jnp.array(targets)).sum())(jnp.float32(padded))
    assert np.isfinite(gradient).all() and (gradient[..., 7:] == 0).all()


def test_accumulated_gradients_are_the_gradient_of_the_mean():
    w = {"w": jnp.array([1.0, -2.0, 0.5])}
    rows = jnp.arange(24.0).reshape(8, 3) / 10

    def loss(params, rows, key):
        return jnp.mean(jnp.tanh(rows @ params["w"]) ** 2)

    whole = accumulated_gradients(loss, w, rows, jax.random.key(0), 1)
    for parts in (2, 4, 8):
        found = accumulated_gradients(loss, w, rows, jax.random.key(0), parts)
        np.testing.assert_allclose(found[0], whole[0], rtol=1e-6)
        np.testing.assert_allclose(found[1]["w"], whole[1]["w"], rtol=1e-5)


def test_training_in_bfloat16_follows_float32():
    exact = trace(20, *ARGUMENTS, "--mesh", "8,1,1")["losses"]
    rounded = trace(20, *ARGUMENTS, "--mesh", "8,1,1", "train.dtype=bfloat16")["losses"]
    np.testing.assert_allclose(rounded, exact, rtol=1e-2)
    assert rounded != exact
