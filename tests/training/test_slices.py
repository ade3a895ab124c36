import jax
import numpy as np
import pytest

from jaxgpt.config import load_config
from jaxgpt.distributed.mesh import make_mesh
from jaxgpt.planning.collectives import read_collectives
from jaxgpt.training.slices import activation_bytes, n_slices
from jaxgpt.training.step import make_steps
from jobs import limited_devices

ARGUMENTS = ("shakespeare_char", "model.n_layer=2", "model.block_size=64", "model.vocab_size=65")


def test_activations_of_a_row_are_those_of_the_paper():
    """GPT-3's layers in arXiv 2205.05198, table 2: a = 96, s = 2048, h = 12288."""
    model = load_config("gpt-175b", "model.vocab_size=2", "model.n_layer=1").model
    sbh = model.block_size * model.n_embd
    per_layer_16_bit = sbh * (34 + 5 * 96 * 2048 / 12288)
    assert (model.n_head, model.block_size, model.n_embd) == (96, 2048, 12288)
    assert activation_bytes(model) == 2 * per_layer_16_bit + 8 * 2 * model.block_size


@pytest.mark.parametrize(
    ("config", "mesh", "slices"),
    [
        (("tiny",), (1, 1, 1), 1),
        (("shakespeare_char_cpu",), (1, 1, 1), 1),
        (("shakespeare_char",), (1, 1, 1), 8),
        (("shakespeare_char",), (8, 1, 1), 1),
        (("shakespeare_char", "train.gradient_accumulation_steps=4"), (1, 1, 1), 2),
        (("shakespeare_char",), (1, 2, 1), 1),
        (("shakespeare_char",), (1, 1, 2), 1),
        (
            ("gpt2", "train.batch_size=6", "train.gradient_accumulation_steps=1"),
            (1, 1, 1),
            6,
        ),  # a row is larger than a slice should be
    ],
)
def test_slices_are_as_few_as_fit_where_devices_have_no_need_to_talk(config, mesh, slices):
    config = load_config(*config, "model.vocab_size=256")
    with limited_devices(np.prod(mesh)):
        assert n_slices(config, make_mesh(mesh)) == slices


def test_batches_that_other_commands_do_not_take_do_no_harm():
    config = load_config("tiny", "model.vocab_size=65", "train.batch_size=2")
    assert n_slices(config, make_mesh((8, 1, 1))) == 1


@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 1, 1)])
def test_slices_change_memory_and_nothing_else(mesh):
    config = load_config(*ARGUMENTS, "train.batch_size=32")
    rows = np.random.default_rng(1).integers(0, 65, (32, 65), dtype=np.int32)
    losses, norms, memory, said = [], [], [], []
    with limited_devices(np.prod(mesh)):
        mesh = make_mesh(mesh)
    for slices in (1, 8):
        steps = make_steps(config, mesh, slices=slices)
        state, batch = steps.init(), jax.device_put(rows, steps.batch_sharding)
        step = steps.train_step.lower(steps.state_shapes, np.int32(1), batch).compile()
        memory.append(step.memory_analysis().temp_size_in_bytes)
        said.append(read_collectives(step.as_text(), dict(mesh.shape)))
        _, metrics = step(state, np.int32(1), batch)
        losses.append(np.asarray(metrics.row_losses))
        norms.append(float(metrics.grad_norm))
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    np.testing.assert_allclose(norms[1], norms[0], rtol=1e-5)
    assert memory[1] < memory[0] / 2
    assert said[1] == said[0]
