"""Every optimizer works the same on every mesh, resumes exactly, and updates all or nothing."""

import functools

import jax
import numpy as np
import pytest

from jaxgpt.checkpoint.checkpointer import Checkpoints
from jaxgpt.config import MeshShape, load_config, mesh_shape
from jaxgpt.models.weights import count_parameters, layer_matrices
from jaxgpt.optim import OPTIMIZERS
from jaxgpt.parallel.mesh import make_mesh
from jaxgpt.perf.hardware import DEVICES
from jaxgpt.plan.program import state_memory
from jaxgpt.train.jitted import make_steps
from jaxgpt.train.state import checkpoint_tree, state_from_checkpoint
from jobs import META, flat, scalars, trace

pytestmark = pytest.mark.usefixtures("layouts_fit")

# Queries, keys and values of 128 rows and columns, which Adafactor factors.
ARGUMENTS = (
    "shakespeare_char_cpu",
    "data.dataset=python",
    "model.n_layer=2",
    "model.block_size=32",
    "train.batch_size=16",
    "optimizer.warmup_iters=0",
    "parallel.scan_layers=True",
)
CHOICES = {
    "adamw": ("optimizer.learning_rate=1e-3",),
    "lion": ("optimizer.learning_rate=1e-4", "optimizer.min_lr=1e-5"),
    "muon": ("optimizer.learning_rate=1e-3", "optimizer.adamw_learning_rate=2e-3"),
    "adafactor": ("optimizer.learning_rate=1e-2",),
    "sgd": ("optimizer.learning_rate=0.1", "optimizer.momentum=0.9"),
    "sgd-without-momentum": ("optimizer.learning_rate=0.1", "optimizer.momentum=0"),
}
LAYOUTS = [
    ("8,1,1", 3, False),
    *(("2,4,1", stage, False) for stage in range(4)),
    ("2,2,2", 1, False),
    ("1,2,4", 3, True),
    ("2,1,4", 3, False),
    ("4,1,2", 3, True),
]
# The short form of the tests uses the optimizer whose state differs most from AdamW's.
OWN_STATES = [pytest.param(c, marks=() if c == "muon" else pytest.mark.long) for c in CHOICES]


def arguments(choice):
    return (*ARGUMENTS, f"optimizer.name={choice.partition('-')[0]}", *CHOICES[choice])


def test_every_optimizer_is_here():
    assert {choice.partition("-")[0] for choice in CHOICES} == set(OPTIMIZERS)


@functools.cache
def reference(choice):
    return trace(20, *arguments(choice), "--mesh", "1,1,1", devices=1, with_final=True)


@pytest.mark.long  # in short, test_newton_schulz.py has a mesh, and so has the seam's Lion
@pytest.mark.parametrize(
    ("choice", "mesh", "zero_stage", "sequence_parallel"),
    [(choice, *layout) for choice in CHOICES for layout in LAYOUTS],
)
def test_a_mesh_changes_nothing(choice, mesh, zero_stage, sequence_parallel):
    expected = reference(choice)
    found = trace(
        20, *arguments(choice), "--mesh", mesh, f"parallel.zero_stage={zero_stage}",
        f"parallel.sequence_parallel={sequence_parallel}", with_final=True,
    )  # fmt: skip
    np.testing.assert_allclose(found["losses"], expected["losses"], rtol=1e-4)
    for path, final in expected["final"].items():
        difference = np.linalg.norm(found["final"][path] - final) / np.linalg.norm(final)
        # The sign of a gradient that is all but zero is a matter of rounding: Lion's update is it.
        assert difference <= (1e-2 if choice == "lion" else 1e-4), path


def same(a, b):
    a, b = flat(a[:2]), flat(b[:2])  # parameters and the optimizer's state
    return a.keys() == b.keys() and all((a[name] == b[name]).all() for name in b)


@functools.cache
def four_steps(choice):
    """Return a run's functions, batch and states, of which the third has a NaN gradient."""
    config = load_config(*arguments(choice), "faults.nan_step=3", "faults.nan_device=5",
                         "model.vocab_size=256", "--mesh", "2,2,2")  # fmt: skip
    steps = make_steps(config, make_mesh(mesh_shape(config)))
    rows = np.random.default_rng(0).integers(0, 64, steps.batch_shape.shape).astype(np.int32)
    batch = jax.device_put(rows, steps.batch_shape.sharding)
    state, states = steps.init(), []
    for step in range(1, 5):
        state, _ = steps.train_step(state, *scalars(config, step), batch)
        states.append(jax.tree.map(np.asarray, state))
    return steps, batch, states


@pytest.mark.parametrize("choice", OWN_STATES)
def test_a_step_that_is_not_finite_leaves_every_bit(choice):
    _, _, (first, second, third, fourth) = four_steps(choice)
    assert same(third, second) and not same(second, first) and not same(fourth, third)
    assert all(np.isfinite(x).all() for x in flat(fourth[:2]).values())
    for before, after in zip(*map(jax.tree.leaves, (first[1], second[1])), strict=True):
        assert not np.array_equal(before, after)  # what is never NaN has nothing to leave


@pytest.mark.parametrize("choice", OWN_STATES)
def test_its_state_is_saved_resumed_bitwise_and_moved(choice, tmp_path):
    steps, batch, states = four_steps(choice)
    config = steps.model.config
    checkpoints = Checkpoints(tmp_path, config)
    placed = jax.tree.map(
        lambda x, at: jax.device_put(x, at.sharding), states[1], steps.state_shapes
    )
    checkpoints.save(2, checkpoint_tree(placed), META)

    def restored(functions):
        shapes = functions.state_shapes
        return state_from_checkpoint(*checkpoints.restore(2, checkpoint_tree(shapes)), shapes)

    state = restored(steps)
    state = state._replace(spike_state=placed.spike_state)
    for step in (3, 4):
        state, _ = steps.train_step(state, *scalars(config, step), batch)
    assert same(state, states[3])
    for shape in (MeshShape(1, 8, 1), MeshShape(2, 1, 4)):
        other = make_steps(config, make_mesh(shape))
        moved = restored(other)
        assert same(moved, states[1])
        for array, expected in zip(*map(jax.tree.leaves, (moved, other.state_shapes)), strict=True):
            assert array.sharding.is_equivalent_to(expected.sharding, array.ndim)
    checkpoints.close()


@pytest.mark.parametrize("choice", CHOICES)
def test_a_plan_counts_the_bytes_of_its_state(choice):
    config = load_config(*arguments(choice), "model.vocab_size=256", "model.bias=True")
    N, _ = count_parameters(config.model)  # 256 tokens: no padding
    hidden = sum(w.size for w in layer_matrices(config.model))
    L, D, V = 2, 128, 256
    # Means of 128 rows and columns of 4 matrices a layer, of up and down, and of the embedding.
    factored = 4 * L * 2 * D + 2 * L * 5 * D + V + D
    rest = N - hidden - V * D
    numbers = {
        "adamw": 2 * N + 1, "lion": N + 1, "sgd": N, "sgd-without-momentum": 0,
        "muon": hidden + 2 * (N - hidden) + 1, "adafactor": factored + rest + 1,
    }  # fmt: skip
    cpu = DEVICES["cpu"]
    assert state_memory(config, MeshShape(8), cpu).moments == 4 * numbers[choice]
    sharded = state_memory(config, MeshShape(1, 8, 1), cpu).moments
    # Norms and biases are whole, and half of Adafactor's means: those over D.
    assert sharded <= 4 * numbers[choice] * (0.7 if choice == "adafactor" else 0.3)
