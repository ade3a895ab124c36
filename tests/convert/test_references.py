"""Converted weights against the programs that they come from, run by a Python with torch.

JAXGPT_TORCH names that Python, which has transformers too; JAXGPT_NANOGPT a clone of nanoGPT.
"""

import os
import subprocess
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from jaxgpt.checkpoint.metadata import read_meta
from jaxgpt.cluster.process_group import ProcessGroup
from jaxgpt.config import MeshShape, config_from_dict
from jaxgpt.convert.__main__ import main
from jaxgpt.models.attention import make_attention
from jaxgpt.models.transformer import gpt_graph
from jaxgpt.parallel.mesh import make_mesh
from jaxgpt.train.evaluate import make_generate
from jaxgpt.train.functions import make_steps
from jaxgpt.train.restart import load_weights
from jobs import limited_devices, scalars

pytestmark = pytest.mark.long
FAMILIES = ("gpt2", "llama3", "tinyllama", "mistral", "qwen2", "qwen3")
MESHES = ("1,1,1", "2,2,2")
V, T = 96, 64


def torch_side(*arguments):
    """Run torch_side.py, or skip the test where there is no torch."""
    python = os.environ.get("JAXGPT_TORCH")
    if python is None:
        pytest.skip("JAXGPT_TORCH names no Python with torch")
    script = Path(__file__).with_name("torch_side.py")
    job = subprocess.run(
        [python, script, *map(str, arguments)], capture_output=True, text=True, timeout=900
    )
    assert job.returncode == 0, job.stderr


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder of models of transformers with what they compute, and ours beside each."""
    folder = tmp_path_factory.mktemp("models")
    torch_side("make", folder)
    for family in FAMILIES:
        main(["from-hf", str(folder / family), "--out", str(folder / "ours" / family)])
        main(
            [
                "to-hf",
                "--run",
                str(folder / "ours" / family),
                "--out",
                str(folder / "back" / family),
            ]
        )
    torch_side("read", folder / "back", *FAMILIES)
    return folder


@pytest.fixture(scope="module")
def nanogpt(tmp_path_factory):
    """The same of nanoGPT, and Megatron's layout of its weights."""
    if "JAXGPT_NANOGPT" not in os.environ:
        pytest.skip("JAXGPT_NANOGPT names no clone of nanoGPT")
    folder = tmp_path_factory.mktemp("nanogpt")
    torch_side("make_nanogpt", folder, os.environ["JAXGPT_NANOGPT"])
    return folder


def batches():
    return np.random.default_rng(0).integers(0, V, (5, 8, T + 1)).astype(np.int32)


def steps_of(folder, mesh="1,1,1"):
    """The functions and the state of a run from weights, on a mesh."""
    sizes = MeshShape.parse(mesh)
    config = config_from_dict(read_meta(folder, 0)["config"], str(folder)).replace(
        parallel__mesh=mesh, train__batch_size=8, optimizer__learning_rate=1e-3,
        optimizer__min_lr=1e-3, optimizer__warmup_iters=0, optimizer__beta2=0.95,
    )  # fmt: skip
    with limited_devices(sizes.n_devices):
        steps = make_steps(config, make_mesh(sizes))
        return config, steps, load_weights(folder, 0, steps, ProcessGroup(launcher="test"))


def logits_of(config, params, tokens):
    graph = gpt_graph(config.model, attend=make_attention("xla", config.model))
    return jax.jit(lambda p, t: nnx.merge(graph, p)(t))(params, tokens)[
        ..., : config.model.vocab_size
    ]


def assert_same_logits(found, expected):
    """Within 2e-4 of the spread of the logits."""
    assert expected.std() > 0.3
    difference = abs(np.asarray(found) - expected).max() / expected.std()
    print(f"logits differ by {difference:.1e} of their spread")
    assert difference < 2e-4


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mesh", MESHES)
def test_logits_and_five_steps_are_those_of_transformers(family, mesh, models):
    expected = np.load(models / family / "expected.npz")
    config, steps, state = steps_of(models / "ours" / family, mesh)
    assert_same_logits(logits_of(config, state.params, batches()[0, :, :-1]), expected["logits"])
    losses = []
    for number, rows in enumerate(batches(), 1):
        rows = jax.device_put(rows, steps.batch_shape.sharding)
        state, metrics = steps.train_step(state, *scalars(config, number), rows)
        losses.append(float(metrics.loss))
    difference = abs(losses / expected["losses"] - 1).max()
    print(f"losses of five steps differ by {difference:.1e}")
    assert difference < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_reads_what_we_write(family, models):
    expected, found = (
        np.load(models / where) for where in (f"{family}/expected.npz", f"back/{family}/found.npz")
    )
    np.testing.assert_allclose(found["logits"], expected["logits"], atol=1e-5)
    config, steps, state = steps_of(models / "ours" / family)
    generate = jax.jit(
        make_generate(steps.make_decoder, config.model.n_positions, V, 50, 0.0, None)
    )
    window = np.zeros(T, np.int32)
    window[:4] = batches()[0, 0, :4]
    text = generate(state.params, window, np.int32(4), np.int32(0))
    np.testing.assert_array_equal(text, found["text"])


@pytest.mark.parametrize("name", ["nanogpt", "nanogpt_plain"])
def test_nanogpts_checkpoint_has_the_same_loss(name, nanogpt, tmp_path):
    main(["from-nanogpt", str(nanogpt / name / "ckpt.pt"), "--out", str(tmp_path / "ours")])
    expected = np.load(nanogpt / name / "expected.npz")
    config, steps, state = steps_of(tmp_path / "ours")
    rows = batches()[0]
    assert_same_logits(logits_of(config, state.params, rows[:, :-1]), expected["logits"])
    loss = np.mean(steps.eval_step(state.params, rows))
    np.testing.assert_allclose(loss, expected["loss"], rtol=1e-5)
    main(["to-nanogpt", "--run", str(tmp_path / "ours"), "--out", str(tmp_path / "back")])
    torch_side("read_nanogpt", tmp_path / "back", os.environ["JAXGPT_NANOGPT"])
    found = np.load(tmp_path / "back" / "found.npz")["logits"]
    np.testing.assert_allclose(found, expected["logits"], atol=1e-5)


@pytest.mark.parametrize("name", ["megatron", "megatron_pipeline"])
def test_megatrons_ranks_are_merged(name, nanogpt, tmp_path):
    main(["from-megatron", str(nanogpt / name), "--out", str(tmp_path / "ours")])
    expected = np.load(nanogpt / "nanogpt" / "expected.npz")
    config, _, state = steps_of(tmp_path / "ours")
    assert config.model.vocab_size == 128
    found = logits_of(config, state.params, batches()[0, :, :-1])[..., :V]
    assert_same_logits(found, expected["logits"])


def test_a_model_without_biases_is_a_gpt2_with_zeros(nanogpt, tmp_path):
    ours, back = tmp_path / "ours", tmp_path / "hf" / "plain"
    main(["from-nanogpt", str(nanogpt / "nanogpt_plain" / "ckpt.pt"), "--out", str(ours)])
    main(["to-hf", "--run", str(ours), "--out", str(back), "--max-shard-size", "100KB"])
    assert len(list(back.glob("model-*.safetensors"))) > 1
    torch_side("read", back.parent, "plain")
    expected = np.load(nanogpt / "nanogpt_plain" / "expected.npz")["logits"]
    assert_same_logits(np.load(back / "found.npz")["logits"], expected)
