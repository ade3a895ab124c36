"""Muon on a mesh: every device orthogonalizes its share of the matrices."""

import functools
import math

import jax
import numpy as np
import pytest

from arrays import random_like
from jaxgpt.config import MeshShape, ModelConfig, load_config, mesh_shape
from jaxgpt.models.weights import Weight, weights
from jaxgpt.optim.muon import is_hidden_matrix
from jaxgpt.optim.newton_schulz import newton_schulz, newton_schulz_flops, orthogonalize
from jaxgpt.optim.parameters import Parameters
from jaxgpt.parallel import sharding
from jaxgpt.parallel.mesh import make_mesh
from jaxgpt.perf.collectives import read_collectives
from jaxgpt.train.jitted import make_steps
from jobs import limited_devices

pytestmark = pytest.mark.usefixtures("layouts_fit")

MODEL = ModelConfig(vocab_size=65, n_embd=64, n_layer=4, n_head=4, block_size=8)
# Of each layer: queries, keys, values and out, D x D; up and down, D x 4 D.
MATRICES = [(64, 64)] * 4 * 4 + [(64, 256)] * 2 * 4
LAYOUTS = [("8,1,1", 3), ("1,8,1", 3), ("2,4,1", 0), ("2,4,1", 1), ("2,2,2", 2), ("2,1,4", 3)]


def product_flops(matrices):
    """Count 2 m n k FLOPs for each product in five steps: X X^T, (X X^T)^2 and times X."""
    return 5 * sum(2 * r * r * c + 2 * r**3 + 2 * r * r * c for r, c in matrices)


def hidden_weights(mesh, zero_stage, model=MODEL):
    described = weights(model)
    at = sharding.weight_shardings(described, sharding.opt_state_rules(zero_stage), mesh)
    return Parameters(described, at).where(is_hidden_matrix)


@functools.cache
def on_one_device():
    hidden = Parameters(hidden_weights(make_mesh(MeshShape(8)), 0).weights)
    return jax.jit(lambda x: orthogonalize(x, hidden))(random_like(hidden.weights, 0))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_singular_values_come_near_to_one(dtype):
    x = np.random.default_rng(0).normal(size=(3, 32, 80)).astype(dtype)
    found = np.linalg.svd(np.float32(newton_schulz(x)), compute_uv=False)
    assert (0.6 < found).all() and (found < 1.3).all()
    assert (np.asarray(newton_schulz(0 * x)) == 0).all()


@pytest.mark.parametrize(("shape", "zero_stage"), LAYOUTS)
def test_each_device_computes_its_share(shape, zero_stage):
    mesh = make_mesh(MeshShape.parse(shape))
    hidden = hidden_weights(mesh, zero_stage)
    arrays = jax.device_put(random_like(hidden.weights, 0), hidden.shardings)
    compiled = jax.jit(lambda x: orthogonalize(x, hidden)).lower(arrays).compile()
    share = product_flops(MATRICES) / 8
    assert newton_schulz_flops(hidden) == share
    assert share <= compiled.cost_analysis()["flops"] <= 1.1 * share
    kinds = {c.kind for c in read_collectives(compiled.as_text(), MeshShape.parse(shape))}
    assert kinds <= {"all-to-all", "all-gather"}
    found = compiled(arrays)
    for a, b in zip(*map(jax.tree.leaves, (found, on_one_device())), strict=True):
        assert np.linalg.norm(a - b) <= 1e-4 * np.linalg.norm(b)
    for array, at in zip(*map(jax.tree.leaves, (found, hidden.shardings)), strict=True):
        assert array.sharding.is_equivalent_to(at, array.ndim)


@pytest.mark.parametrize(
    "weight",
    [
        Weight("gate_up", (2, 64, 2, 96), ("layers", "embed", "parts", "mlp"), "matrix", 1),
        # Tensor=2 does not divide the three heads: each device along it has them whole.
        Weight("kv", (2, 64, 2, 3, 8), ("layers", "embed", "parts", "heads", None), "matrix", 1),
        Weight("out", (2, 4, 8, 64), ("layers", "heads", None, "embed"), "matrix", 2),
        Weight("turned", (2, 8, 4, 64), ("layers", None, "heads", "embed"), "matrix", 2),
    ],
    ids=lambda weight: weight.name,
)
def test_each_part_of_a_weight_is_a_matrix_of_its_own(weight):
    mesh = make_mesh(MeshShape(2, 2, 2))
    at = sharding.weight_shardings({"w": weight}, sharding.opt_state_rules(3), mesh)
    x = random_like({"w": weight}, 0)
    parameters = Parameters({"w": weight}, at)
    found = np.asarray(jax.jit(lambda x: orthogonalize(x, parameters))(jax.device_put(x, at))["w"])
    n_parts = 2 if "parts" in weight.axes else 1
    for layer in range(2):
        for part in range(n_parts):
            own = (layer, slice(None), part) if n_parts == 2 else (layer,)
            matrix = x["w"][own].reshape(math.prod(x["w"][own].shape[: weight.n_inputs]), -1)
            if matrix.shape[0] > matrix.shape[1]:
                expected = newton_schulz(matrix.T[None])[0].T
            else:
                expected = newton_schulz(matrix[None])[0]
            np.testing.assert_allclose(found[own].reshape(matrix.shape), expected, atol=1e-4)


def test_matrices_that_devices_do_not_divide_are_padded():
    """Three layers have 12 and 6 matrices of two sizes: 2 and 1 for each of 8 devices."""
    mesh = make_mesh(MeshShape(2, 2, 2))
    model = ModelConfig(vocab_size=65, n_embd=64, n_layer=3, n_head=4, block_size=8)
    hidden = hidden_weights(mesh, 3, model)
    arrays = random_like(hidden.weights, 0)
    placed = jax.device_put(arrays, hidden.shardings)
    compiled = jax.jit(lambda x: orthogonalize(x, hidden)).lower(placed).compile()
    share = product_flops([(64, 64)] * 2 + [(64, 256)])
    assert newton_schulz_flops(hidden) == share
    assert share <= compiled.cost_analysis()["flops"] <= 1.1 * share
    expected = orthogonalize(arrays, Parameters(hidden.weights))
    for a, b in zip(*map(jax.tree.leaves, (compiled(placed), expected)), strict=True):
        assert np.linalg.norm(a - b) <= 1e-4 * np.linalg.norm(b)


@pytest.mark.long
@pytest.mark.parametrize("mesh", ["2,2,2", "1,1,1"])
def test_leaving_an_update_out_does_not_compute_it_twice(mesh):
    """`gate_sequentially` calls the update twice, but its matrix products are computed once."""
    flops = {}
    for name in ("adamw", "muon"):
        config = load_config(
            "tiny", "model.vocab_size=256", "model.n_layer=2", "spike.action=skip_update",
            f"optimizer.name={name}", "--mesh", mesh,
        )  # fmt: skip
        shape = mesh_shape(config)
        with limited_devices(shape.n_devices):
            steps = make_steps(config, make_mesh(shape))
        flops[name] = steps.lower_train_step().compile().cost_analysis()["flops"]
    share = product_flops([(128, 128)] * 8 + [(128, 512)] * 4) / shape.n_devices
    if shape.n_devices == 8:  # the four are padded to eight
        share = product_flops([(128, 128), (128, 512)])
    assert 0.9 * share <= flops["muon"] - flops["adamw"] <= 1.1 * share
