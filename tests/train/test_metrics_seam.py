"""The metric that the README of train/ adds."""

import re
from types import ModuleType

import jax
import numpy as np
import pytest
from flax import nnx

from jaxgpt.config import load_config, mesh_shape
from jaxgpt.data.batch import input_batch
from jaxgpt.models import transformer
from jaxgpt.models.transformer import GPT
from jaxgpt.parallel.mesh import make_mesh
from jaxgpt.train import step as step_module
from jaxgpt.train.jitted import make_steps
from jobs import SMALL, limited_devices, records, scalars, train_here
from readme_code import ROOT, load_block, train_and_move


@pytest.fixture
def largest_logit(monkeypatch, tmp_path):
    module = load_block("jaxgpt/train/README.md", "largest_logit", tmp_path)
    monkeypatch.setitem(step_module.STEP_METRICS, "largest_logit", module.largest_logit)
    monkeypatch.setattr(transformer, "loss_parts", changed_loss().loss_parts)


def changed_loss():
    """Return jaxgpt.models.loss with the changes that the README shows."""
    (diff,) = re.findall(r"```diff\n(.*?)```", (ROOT / "jaxgpt/train/README.md").read_text(), re.S)
    text = (ROOT / "jaxgpt/models/loss.py").read_text()
    for hunk in diff.split("...\n"):
        lines = hunk.splitlines(keepends=True)
        old, new = ("".join(x[1:] for x in lines if x[0] == sign) for sign in "-+")
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    module = ModuleType("changed_loss")
    exec(text, vars(module))
    return module


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        ("--mesh", "1,1,1"),
        ("--mesh", "2,2,2", "train.gradient_accumulation_steps=2"),
        ("--mesh", "1,2,4", "train.loss_chunk=50", "parallel.sequence_parallel=True"),
    ],
    ids=" ".join,
)
def test_it_is_the_largest_of_all_logits_on_any_mesh(largest_logit, options):
    config = load_config(*SMALL[1:], *options).replace(model__vocab_size=256)
    sizes = mesh_shape(config)
    with limited_devices(sizes.n_devices):
        mesh = make_mesh(sizes)
    steps = make_steps(config, mesh)
    tokens = np.random.default_rng(0).integers(0, 256, steps.batch_shape.shape).astype(np.int32)
    state = steps.init()
    network = GPT(config.model, rngs=nnx.Rngs(0))
    nnx.update(network, jax.tree.map(np.asarray, state.params))
    expected = float(network(input_batch(tokens[:, :-1])).max())
    batch = jax.device_put(tokens, steps.batch_shape.sharding)
    _, metrics = steps.train_step(state, *scalars(config, 1), batch)
    assert float(metrics.scalars["largest_logit"]) == pytest.approx(expected, rel=1e-5)


def test_it_reaches_the_log_and_every_tracker(largest_logit, tmp_path):
    train_and_move(train_here, records, tmp_path / "run", *SMALL)
    found = [r["largest_logit"] for r in records(tmp_path / "run")]
    assert len(found) == 6 and all(np.isfinite(found))
