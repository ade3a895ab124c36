"""Every layout of a step over devices gives the same losses and the same parameters."""

import functools
import itertools

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxgpt.config import MeshShape, load_config, mesh_shape
from jaxgpt.parallel.mesh import make_mesh
from jaxgpt.train.jitted import make_steps
from jobs import FIGHT, scalars, trace

pytestmark = pytest.mark.usefixtures("layouts_fit")

ARGUMENTS = (
    "shakespeare_char_cpu",
    "data.dataset=python",
    "model.n_layer=2",
    "model.n_embd=32",
    "model.block_size=32",
    "model.bias=True",
    "train.batch_size=32",
    "optimizer.warmup_iters=0",
)
CHOICES = {
    "parallel.mesh": ("2,4,1", "2,2,2", "1,2,4"),
    "parallel.zero_stage": (0, 1, 2, 3),
    "parallel.sequence_parallel": (False, True),
    "parallel.remat": ("none", "full", "dots", "attention"),
    "parallel.scan_layers": (False, True),
    "train.gradient_accumulation_steps": (1, 4),
}
OFFLOADED = ("parallel.offload=state", "parallel.scan_layers=True")
LONG = {"attention"}  # other settings of remat do all that it does, and more
ALL = [
    chosen
    for chosen in itertools.product(*CHOICES.values())
    if not (chosen[0].endswith(",1") and chosen[2])  # nothing to split the sequence over
]


def pairwise(rows):
    """Return a few of the rows that still contain every pair of values."""

    def pairs(row):
        return set(itertools.combinations(enumerate(row), 2))

    missing, chosen = set().union(*map(pairs, rows)), []
    while missing:
        chosen.append(max(rows, key=lambda row: len(pairs(row) & missing)))
        missing -= pairs(chosen[-1])
    return chosen


@functools.cache
def reference(n_steps):
    return trace(n_steps, *ARGUMENTS, "--mesh", "1,1,1", devices=1, with_final=True)


def options_rows(options):
    """Return the number of rows in an evaluation batch, which is that of a microbatch."""
    return load_config(*ARGUMENTS, *options).microbatch_size


@functools.cache
def evaluated(rows):
    """Return the initial loss of `rows` rows on one device."""
    options = ("--mesh", "1,1,1", f"train.batch_size={rows}")
    return trace(0, *ARGUMENTS, *options, devices=1)["evaluated"]


def check(*options, n_steps=8, loss=1e-4, parameters=1e-4):
    """Compare with one device; return the largest relative difference of a parameter."""
    expected = reference(n_steps)
    found = trace(n_steps, *ARGUMENTS, *options, with_final=True)
    assert found["params"] == expected["params"]
    assert found["rows"] == expected["rows"]
    np.testing.assert_allclose(found["losses"], expected["losses"], rtol=loss)
    np.testing.assert_allclose(found["norms"], expected["norms"], rtol=10 * loss)
    rows = options_rows(options)
    np.testing.assert_allclose(found["evaluated"], evaluated(rows), rtol=1e-5)
    differences = {
        path: np.linalg.norm(found["final"][path] - final) / np.linalg.norm(final)
        for path, final in expected["final"].items()
    }
    assert max(differences.values()) <= parameters, differences
    return max(differences.values())


def as_options(chosen):
    return [f"{key}={value}" for key, value in zip(CHOICES, chosen, strict=True)]


@pytest.mark.long  # in short, test_families.py trains on a layout with most of them
@pytest.mark.parametrize(
    "chosen",
    [  # the first rows have most of the pairs
        pytest.param(c, id=" ".join(map(str, c)))
        for c in pairwise([c for c in ALL if not LONG & set(c)])
    ],
)
def test_a_strategy_changes_nothing_but_speed_and_memory(chosen):
    check(*as_options(chosen))


@pytest.mark.long
@pytest.mark.parametrize("chosen", ALL, ids=lambda c: " ".join(map(str, c)))
def test_all_strategies_change_nothing_but_speed_and_memory(chosen):
    check(*as_options(chosen), n_steps=20)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("--mesh", "8,1,1", "train.loss_chunk=50"), marks=pytest.mark.long),
        pytest.param(("--mesh", "2,1,4", "train.loss_chunk=50"), marks=pytest.mark.long),
        pytest.param(
            ("--mesh", "1,2,4", "train.loss_chunk=16", "parallel.sequence_parallel=True"),
            marks=pytest.mark.long,
        ),
        pytest.param(("--mesh", "2,4,1", "parallel.offload=moments"), marks=pytest.mark.long),
        *(
            pytest.param((*OFFLOADED, *options), marks=pytest.mark.long)
            for options in (
                ("--mesh", "2,2,2", "train.gradient_accumulation_steps=4"),
                ("--mesh", "2,2,2", "parallel.zero_stage=0"),
                ("--mesh", "2,4,1", "parallel.zero_stage=1", "parallel.remat=full"),
                ("--mesh", "1,4,2", "parallel.zero_stage=2", "parallel.remat=dots"),
                ("--mesh", "1,2,4", "parallel.sequence_parallel=True", "train.loss_chunk=16"),
            )
        ),
        *(
            pytest.param(
                ("--mesh", mesh, "parallel.reduce_every=microbatch", f"parallel.zero_stage={stage}",
                 "train.gradient_accumulation_steps=4"),
                marks=pytest.mark.long,
            )
            for mesh, stage in (("1,8,1", 2), ("2,4,1", 3))
        ),
    ],
    ids=" ".join,
)  # fmt: skip
def test_other_options_change_nothing_either(options):
    check(*options)


@pytest.mark.long
def test_gradients_that_travel_in_bfloat16_are_rounded():
    rounding = 2.0**-8
    options = ("--mesh", "2,4,1", "parallel.grad_reduce_dtype=bfloat16")
    assert check(*options, loss=rounding, parameters=0.1) > 1e-4  # more than float32 differs


@pytest.mark.long  # in short, test_generate.py has such a mesh
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=str)
def test_a_vocabulary_that_tensor_does_not_divide_is_shared_out(sequence_parallel):
    # Tensor=3 divides the heads, the channels and the sequence, and not the 256 tokens.
    arguments = (*ARGUMENTS, "model.n_head=6", "model.n_embd=30", "model.block_size=33")
    alone = trace(5, *arguments, "--mesh", "1,1,1", devices=1)
    options = ("--mesh", "1,2,3", f"parallel.sequence_parallel={sequence_parallel}")
    found = trace(5, *arguments, *options, devices=6)
    np.testing.assert_allclose(found["losses"], alone["losses"], rtol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("offload", ["moments", "state"])
def test_offloaded_state_lives_in_the_hosts_memory(offload):
    options = ("--mesh", "2,4,1", f"parallel.offload={offload}", "parallel.scan_layers=True")
    config = load_config(*ARGUMENTS, *options).replace(model__vocab_size=256)
    steps = make_steps(config, make_mesh(MeshShape(2, 4, 1)))
    state = steps.init()
    rows = jax.device_put(np.zeros((32, 33), np.int32), steps.batch_shape.sharding)
    for _ in range(2):
        moments = [m for m in jax.tree.leaves(state.opt_state) if m.ndim > 0]
        assert len(moments) == 2 * len(jax.tree.leaves(state.params))
        assert {m.sharding.memory_kind for m in moments} == {"pinned_host"}
        params = "pinned_host" if offload == "state" else "device"
        assert {p.sharding.memory_kind for p in jax.tree.leaves(state.params)} == {params}
        state, _ = steps.train_step(state, *scalars(config, 1), rows)


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        ("--mesh", "1,1,1"),
        ("--mesh", "2,2,2", "parallel.zero_stage=0"),
        ("--mesh", "2,2,2", "parallel.zero_stage=3"),
    ],
    ids=" ".join,
)
def test_twenty_steps_are_the_same_with_their_state_in_the_hosts_memory(options):
    n = mesh_shape(load_config("tiny", *options)).n_devices
    options = (*ARGUMENTS, *options, "parallel.scan_layers=True", "optimizer.grad_clip=0")
    kept, moments, state = (
        trace(20, *options, f"parallel.offload={offload}", devices=n, with_final=True)
        for offload in ("none", "moments", "state")
    )
    for found in (moments, state):
        np.testing.assert_allclose(found["losses"], kept["losses"], rtol=1e-6)
        assert found["evaluated"] == kept["evaluated"]
        for path, final in kept["final"].items():
            np.testing.assert_allclose(found["final"][path], final, rtol=0, atol=1e-6)


def test_a_layout_that_xla_fights_is_noticed(capfd):
    """The warning that `layouts_fit` looks for does appear, and on stderr."""
    mesh = make_mesh(MeshShape(2, 4, 1))

    def fight(x):
        x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("fsdp")))
        return jax.lax.with_sharding_constraint(x + 1, NamedSharding(mesh, P(None, "data")))

    jax.jit(fight).lower(jax.ShapeDtypeStruct((8, 8, 8), np.float32)).compile()
    assert FIGHT in capfd.readouterr().err
