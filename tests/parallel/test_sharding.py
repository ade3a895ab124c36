import jax
import pytest
from jax.sharding import PartitionSpec as P

from jaxgpt.config import MeshShape, UsageError, load_config
from jaxgpt.parallel.mesh import make_mesh
from jaxgpt.parallel.sharding import (
    gradient_rules,
    opt_state_rules,
    parameter_rules,
    partition_spec,
)
from jaxgpt.plan.program import COMPILE_ONLY
from jaxgpt.train.jitted import make_steps
from jobs import limited_devices


def state_on(mesh, *overrides):
    config = load_config("shakespeare_char_cpu", *overrides).replace(model__vocab_size=65)
    return make_steps(config, make_mesh(MeshShape(*mesh))).init()


def bytes_on_one_device(tree):
    device = jax.devices()[0]
    shards = [s for x in jax.tree.leaves(tree) for s in x.addressable_shards if s.device == device]
    return sum(s.data.nbytes for s in shards)


def test_a_dimension_lies_where_its_meaning_says():
    mesh = MeshShape(2, 2, 2)
    spec = partition_spec(("embed", None, "heads", None), (128, 3, 4, 32), parameter_rules(3), mesh)
    assert spec == P("fsdp", None, "tensor", None)
    spec = partition_spec(("embed", None, "heads", None), (128, 3, 4, 32), parameter_rules(2), mesh)
    assert spec == P(None, None, "tensor", None)


def test_a_dimension_that_does_not_divide_stays_whole():
    spec = partition_spec(("vocab", "embed"), (130, 128), parameter_rules(3), MeshShape(1, 2, 4))
    assert spec == P(None, "fsdp")


@pytest.mark.parametrize(
    ("stage", "parameters", "gradients", "moments"),
    [(0, None, None, None), (1, None, None, "fsdp"), (2, None, "fsdp", "fsdp"), (3, *["fsdp"] * 3)],
)
def test_zero_stages_are_those_of_the_paper(stage, parameters, gradients, moments):
    mesh = make_mesh(MeshShape(1, 8, 1))
    for rules, expected in (
        (parameter_rules, parameters),
        (gradient_rules, gradients),
        (opt_state_rules, moments),
    ):
        assert partition_spec(("embed", "mlp"), (128, 512), rules(stage), mesh.shape)[0] == expected


def test_fully_sharded_state_takes_an_eighth_of_a_device():
    def of_parameters(state):
        return bytes_on_one_device((state.params, state.opt_state))

    whole = of_parameters(state_on((8, 1, 1), "parallel.zero_stage=0"))
    eighth = of_parameters(state_on((1, 8, 1)))
    config = load_config("shakespeare_char_cpu").model
    # Three float32 arrays (parameters, two moments) of 4 x (12 D^2 + 2 D) + (128 + T) D + D.
    n = 4 * (12 * 128**2 + 2 * 128) + (128 + config.block_size) * 128 + 128
    assert whole == 3 * 4 * n + 4
    assert eighth / whole <= 1 / 8 + 0.02


def test_zero_1_shards_moments_only():
    state = state_on((1, 8, 1), "parallel.zero_stage=1")
    whole = state_on((8, 1, 1), "parallel.zero_stage=0")
    assert bytes_on_one_device(state.params) == bytes_on_one_device(whole.params)
    assert bytes_on_one_device(state.opt_state) <= (1 / 8 + 0.02) * bytes_on_one_device(
        whole.opt_state
    )


def test_zero_3_never_holds_all_layers_whole():
    """The weights of a layer are gathered for its forward pass and again for its backward pass."""
    temporary = {}
    for stage in (2, 3):
        config = load_config(
            "tiny", "model.n_layer=8", "model.n_embd=256", "train.batch_size=8",
            "model.block_size=32", "parallel.scan_layers=True", f"parallel.zero_stage={stage}",
        ).replace(model__vocab_size=256)  # fmt: skip
        steps = make_steps(config, make_mesh(MeshShape(1, 8, 1)))
        compiled = steps.lower_train_step().compile(COMPILE_ONLY)
        temporary[stage] = compiled.memory_analysis().temp_size_in_bytes
    layers = 8 * 12 * 256**2 * 4  # bytes
    assert temporary[3] < temporary[2] - layers / 2


@pytest.mark.parametrize(
    ("mesh", "stage", "words"),
    [
        (MeshShape(1, 2, 3), 3, "vocab=128 is replicated, because 3 does not divide it"),
        (MeshShape(1, 4, 1), 1, "embed=126 is replicated, because 4 does not divide it"),
    ],
)
def test_what_cannot_be_divided_is_said(mesh, stage, words):
    arguments = ("model.n_head=6", "model.n_embd=126", f"parallel.zero_stage={stage}")
    config = load_config("shakespeare_char_cpu", *arguments).replace(model__vocab_size=65)
    with limited_devices(mesh.n_devices):
        steps = make_steps(config, make_mesh(mesh))
    assert steps.warnings == (words,)


def test_an_mlp_that_tensor_does_not_divide_is_refused():
    """Each device would compute the whole MLP, and the sum would be too large."""
    with pytest.raises(UsageError, match="tensor=2 does not divide the width of the MLP, 65"):
        load_config("tiny", "--mesh", "1,1,2", "model.mlp_hidden=65")
