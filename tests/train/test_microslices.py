import jax
import numpy as np
import optax
import pytest

from jaxgpt.config import MeshShape, ModelConfig, UsageError, load_config
from jaxgpt.models.weights import activation_bytes
from jaxgpt.parallel.mesh import make_mesh
from jaxgpt.perf.collectives import read_collectives
from jaxgpt.train.jitted import make_steps
from jaxgpt.train.sharded_model import SLICE_BYTES, choose_n_slices
from jobs import flat, limited_devices, scalars

ARGUMENTS = ("shakespeare_char", "model.n_layer=2", "model.block_size=64", "model.vocab_size=65")


def test_activations_of_a_row_are_those_of_the_paper():
    """GPT-3's layers in arXiv 2205.05198, table 2: a = 96, s = 2048, h = 12288."""
    options = "model.vocab_size=2", "model.n_layer=1", "model.attention=xla", "train.loss_chunk=0"
    config = load_config("gpt-175b", *options)
    model, per_layer_16_bit = config.model, 2048 * 12288 * (34 + 5 * 96 * 2048 / 12288)
    assert (model.n_head, model.block_size, model.n_embd) == (96, 2048, 12288)
    assert activation_bytes(model) == 2 * per_layer_16_bit + 8 * 2 * 2048
    assert activation_bytes(model, with_logits=False) == 2 * per_layer_16_bit


def test_activations_need_a_vocabulary_size():
    with pytest.raises(UsageError, match=r"model\.vocab_size=None"):
        activation_bytes(ModelConfig())


@pytest.mark.parametrize("batch_size", [64, 48, 32, 17])
def test_slices_have_about_the_size_that_is_fast(batch_size):
    config = load_config(
        "shakespeare_char", "model.vocab_size=65", f"train.batch_size={batch_size}"
    )
    n = choose_n_slices(config, one_device())
    assert batch_size % n == 0
    row = activation_bytes(config.model)
    if batch_size == 17:  # 17 slices of a row would be worse than one that is too large
        assert n == 1
    else:
        assert SLICE_BYTES / 2 < batch_size // n * row < SLICE_BYTES * 2


@pytest.mark.parametrize(
    ("config", "mesh"),
    [
        (("tiny",), (1, 1, 1)),  # fits
        (("shakespeare_char_cpu",), (1, 1, 1)),
        (("shakespeare_char",), (8, 1, 1)),
        (("shakespeare_char", "train.gradient_accumulation_steps=8"), (1, 1, 1)),
        (("shakespeare_char",), (1, 2, 1)),  # would gather or sum once for each
        (("shakespeare_char",), (1, 1, 2)),
        (("tiny", "train.batch_size=2"), (8, 1, 1)),  # no rows: a command that does not train
    ],
)
def test_rows_stay_together_where_nothing_is_won(config, mesh):
    with limited_devices(np.prod(mesh)):
        assert (
            choose_n_slices(
                load_config(*config, "model.vocab_size=65"), make_mesh(MeshShape(*mesh))
            )
            == 1
        )


def test_a_slice_does_more_than_add_up_gradients():
    config = load_config("gpt2", "train.batch_size=8", "train.gradient_accumulation_steps=1")
    config = config.replace(model__block_size=64)  # activations of a row: 51 MB; parameters: 496 MB
    assert choose_n_slices(config, one_device()) == 1


def one_device():
    with limited_devices(1):
        return make_mesh(MeshShape(1, 1, 1))


@pytest.mark.long
def test_cpus_compute_in_slices_by_themselves_and_save_no_less_with_remat():
    sizes = []
    for slices, remat in ((1, "none"), (None, "none"), (None, "attention"), (None, "full")):
        config = load_config(*ARGUMENTS, "train.batch_size=512", f"parallel.remat={remat}")
        steps = make_steps(config, one_device(), slices=slices)
        step = steps.lower_train_step().compile()
        sizes.append(step.memory_analysis().temp_size_in_bytes)
    whole, sliced, without_scores, without_activations = sizes
    assert sliced < 0.6 * whole
    assert without_activations < without_scores <= sliced


@pytest.mark.long  # in short, test_step.py compares what is written for CPUs and for GPUs
@pytest.mark.parametrize(
    ("mesh", "parts"),
    [
        ((1, 1, 1), 1),
        ((2, 1, 1), 1),
        ((2, 1, 1), 2),
    ],
    ids=["one device", "two devices", "two devices, two microbatches"],
)
def test_slices_change_memory_and_nothing_else(mesh, parts):
    config = load_config(
        *ARGUMENTS, "model.n_embd=128", "model.n_head=2", "train.batch_size=128",
        f"train.gradient_accumulation_steps={parts}",
    )  # fmt: skip
    rows = np.random.default_rng(1).integers(0, 65, (128, 65), dtype=np.int32)
    with limited_devices(np.prod(mesh)):
        mesh = make_mesh(MeshShape(*mesh))
    losses, gradients, evaluated, memory, said = [], [], [], [], []
    for slices in (1, 4):
        steps = make_steps(config, mesh, slices=slices)
        state, batch = steps.init(), jax.device_put(rows, steps.batch_shape.sharding)
        part = jax.device_put(rows[: 128 // parts], steps.batch_shape.sharding)
        step = steps.train_step.lower(state, *scalars(config, 1), batch).compile()
        evaluate = steps.eval_step.lower(state.params, part).compile()
        memory.append([p.memory_analysis().temp_size_in_bytes for p in (step, evaluate)])
        said.append([read_collectives(p.as_text(), dict(mesh.shape)) for p in (step, evaluate)])
        evaluated.append(np.asarray(evaluate(state.params, part)))
        state, metrics = step(state, *scalars(config, 1), batch)
        losses.append(np.asarray(metrics.row_losses))
        gradients.append(
            flat(optax.tree_utils.tree_get(state.opt_state, "mu"))
        )  # (1 - beta1) times the gradient
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    np.testing.assert_allclose(evaluated[1], evaluated[0], rtol=1e-5)
    for path, whole in gradients[0].items():
        far = np.linalg.norm(gradients[1][path] - whole)
        assert far <= 1e-4 * np.linalg.norm(whole), path
    for sliced, whole in zip(memory[1], memory[0], strict=True):
        assert sliced < 0.6 * whole
    assert said[1] == said[0]
