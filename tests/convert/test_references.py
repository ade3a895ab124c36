"""Converted weights give the same results as in the programs that they come from.

The tests need torch and transformers. JAXGPT_NANOGPT names a clone of nanoGPT.
"""

import os
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from jaxgpt.checkpoint.metadata import read_meta
from jaxgpt.cluster.process_group import ProcessGroup
from jaxgpt.config import MeshShape, Sampling, config_from_dict
from jaxgpt.convert import safetensors
from jaxgpt.convert.__main__ import main
from jaxgpt.convert.huggingface import to_hf
from jaxgpt.data.batch import input_batch
from jaxgpt.models.transformer import gpt_graph
from jaxgpt.parallel.mesh import make_mesh
from jaxgpt.train.generate import make_generate
from jaxgpt.train.jitted import make_steps
from jaxgpt.train.restart import load_weights
from jobs import limited_devices, scalars

pytestmark = pytest.mark.long
FAMILIES = (
    "gpt2", "llama3", "tinyllama", "mistral", "qwen2", "qwen2_windows", "qwen3", "gemma3",
    "gemma3_scaled",
)  # fmt: skip
MESHES = ("1,1,1", "2,2,2")
V, T = 96, 64
NANOGPT = os.environ.get("JAXGPT_NANOGPT")


@pytest.fixture(scope="module")
def reference():
    """Return the module with the reference models; skip without torch or transformers."""
    import reference_models  # importing transformers takes seconds

    return reference_models


@pytest.fixture(scope="module")
def models(reference, tmp_path_factory):
    """A folder with transformers models and their conversions, and transformers' results."""
    folder = tmp_path_factory.mktemp("models")
    expected = reference.save_transformers(folder)
    for family in FAMILIES:
        ours = str(folder / "ours" / family)
        main(["from-hf", str(folder / family), "--out", ours])
        main(["to-hf", "--run", ours, "--out", str(folder / "back" / family)])
    return folder, expected


@pytest.fixture(scope="module")
def nanogpt(reference, tmp_path_factory):
    """A folder with nanoGPT checkpoints and Megatron layouts, and nanoGPT's results."""
    if NANOGPT is None:
        pytest.skip("JAXGPT_NANOGPT names no clone of nanoGPT")
    folder = tmp_path_factory.mktemp("nanogpt")
    return folder, reference.save_nanogpt(folder, NANOGPT)


def batches():
    return np.random.default_rng(0).integers(0, V, (5, 8, T + 1)).astype(np.int32)


def steps_of(folder, mesh="1,1,1"):
    """Return the compiled functions and the state of a run that starts from weights, on a mesh."""
    sizes = MeshShape.parse(mesh)
    config = config_from_dict(read_meta(folder, 0)["config"], str(folder)).replace(
        parallel__mesh=mesh, train__batch_size=8, optimizer__learning_rate=1e-3,
        optimizer__min_lr=1e-3, optimizer__warmup_iters=0, optimizer__beta2=0.95,
    )  # fmt: skip
    with limited_devices(sizes.n_devices):
        steps = make_steps(config, make_mesh(sizes))
        return config, steps, load_weights(folder, 0, steps, ProcessGroup(launcher="test"))


def logits_of(config, params, tokens):
    graph = gpt_graph(config.model)
    compute = jax.jit(lambda params, tokens: nnx.merge(graph, params)(input_batch(tokens)))
    return compute(params, tokens)[..., : config.model.vocab_size]


def assert_same_logits(found, expected):
    """Assert that two arrays of logits agree to 2e-4 of their spread."""
    assert expected.std() > 0.3
    difference = abs(np.asarray(found) - expected).max() / expected.std()
    print(f"logits differ by {difference:.1e} of their spread")
    assert difference < 2e-4


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mesh", MESHES)
def test_logits_and_five_steps_are_those_of_transformers(family, mesh, models):
    folder, expected = models
    logits, expected_losses = expected[family]
    config, steps, state = steps_of(folder / "ours" / family, mesh)
    assert_same_logits(logits_of(config, state.params, batches()[0, :, :-1]), logits)
    losses = []
    for number, rows in enumerate(batches(), 1):
        rows = jax.device_put(rows, steps.batch_shape.sharding)
        state, metrics = steps.train_step(state, *scalars(config, number), rows)
        losses.append(float(metrics.loss))
    difference = abs(np.divide(losses, expected_losses) - 1).max()
    print(f"losses of five steps differ by {difference:.1e}")
    assert difference < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_reads_what_we_write(family, models, reference):
    folder, expected = models
    logits, expected_text = reference.run_transformers(folder / "back" / family)
    np.testing.assert_allclose(logits, expected[family][0], atol=1e-5)
    config, steps, state = steps_of(folder / "ours" / family)
    generate = jax.jit(
        make_generate(steps.make_decoder, config.model.n_positions, V, 50, Sampling())
    )
    window = np.zeros(T, np.int32)
    window[:4] = batches()[0, 0, :4]
    text = generate(state.params, window, np.int32(4), np.int32(0))
    np.testing.assert_array_equal(text, expected_text)


@pytest.mark.parametrize("name", ["nanogpt", "nanogpt_plain"])
def test_nanogpts_checkpoint_has_the_same_loss(name, nanogpt, reference, tmp_path):
    folder, expected = nanogpt
    logits, expected_loss = expected[name]
    main(["from-nanogpt", str(folder / name / "ckpt.pt"), "--out", str(tmp_path / "ours")])
    config, steps, state = steps_of(tmp_path / "ours")
    rows = batches()[0]
    assert_same_logits(logits_of(config, state.params, rows[:, :-1]), logits)
    loss = np.mean(steps.eval_step(state.params, rows))
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    main(["to-nanogpt", "--run", str(tmp_path / "ours"), "--out", str(tmp_path / "back")])
    found = reference.run_nanogpt(tmp_path / "back", NANOGPT)
    np.testing.assert_allclose(found, logits, atol=1e-5)


@pytest.mark.parametrize("name", ["megatron", "megatron_pipeline"])
def test_megatrons_ranks_are_merged(name, nanogpt, tmp_path):
    folder, expected = nanogpt
    main(["from-megatron", str(folder / name), "--out", str(tmp_path / "ours")])
    config, _, state = steps_of(tmp_path / "ours")
    assert config.model.vocab_size == 128
    found = logits_of(config, state.params, batches()[0, :, :-1])[..., :V]
    assert_same_logits(found, expected["nanogpt"][0])


def test_a_model_without_biases_is_a_gpt2_with_zeros(nanogpt, reference, tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors, "SHARD_BYTES", 100_000)
    folder, expected = nanogpt
    ours, back = str(tmp_path / "ours"), tmp_path / "plain"
    main(["from-nanogpt", str(folder / "nanogpt_plain" / "ckpt.pt"), "--out", ours])
    to_hf(Path(ours), None, back, "float32")
    assert len(list(back.glob("model-*.safetensors"))) > 1
    assert_same_logits(reference.run_transformers(back)[0], expected["nanogpt_plain"][0])
