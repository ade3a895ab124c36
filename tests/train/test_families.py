"""Every model family has the losses of one device on every layout."""

import itertools

import jax
import numpy as np
import pytest

from jaxgpt.config import MeshShape, load_config
from jaxgpt.parallel.mesh import make_mesh
from jaxgpt.train.jitted import make_steps
from jobs import limited_devices, scalars

ROPE = ("model.norm=rmsnorm", "model.position=rope", "model.mlp=swiglu", "model.mlp_hidden=96")
FAMILIES = {
    "gpt2": ("model.bias=True",),
    "llama": (*ROPE, "model.n_kv_head=2", "model.tie_embeddings=False"),
    "mistral": (*ROPE, "model.n_kv_head=1", "model.sliding_window=20"),
    "qwen2": (*ROPE, "model.n_kv_head=2", "model.qkv_bias=True"),
    "qwen3": (*ROPE, "model.n_kv_head=4", "model.qk_norm=True", "model.head_dim=8"),
}
SHAPE = (
    "model.n_layer=2", "model.n_embd=48", "model.block_size=64", "model.vocab_size=61",
    "model.mlp_hidden=96", "train.batch_size=8", "optimizer.warmup_iters=2",
    "optimizer.learning_rate=2e-3",
)  # fmt: skip
MASKED = ("data.document_mask=True", "data.end_of_text=7")
STEPS = 20
LAYOUTS = list(itertools.product((0, 3), (1, 2, 4), (False, True), (False, True)))
SHORT = ("llama", (3, 4, True, True))


def losses_of(family, mesh, *settings):
    """Return the losses of 20 steps on random rows; every mesh has the same initial weights."""
    sizes = MeshShape.parse(mesh)
    config = load_config("tiny", *SHAPE, *FAMILIES[family], "--mesh", mesh, *settings)
    rows = np.random.default_rng(0).integers(0, 61, (STEPS, 8, 65)).astype(np.int32)
    rows[:, :, ::9] = 7  # documents of at most 9 tokens
    with limited_devices(sizes.n_devices):
        steps = make_steps(config, make_mesh(sizes))
        state, found = steps.init(), []
        for number, batch in enumerate(rows, 1):
            batch = jax.device_put(batch, steps.batch_shape.sharding)
            state, metrics = steps.train_step(state, *scalars(config, number), batch)
            found.append(metrics.loss)
    return np.array(found)


@pytest.fixture(scope="module")
def one_device():
    """(family, with documents) -> losses on one device, computed once."""
    known = {}

    def losses(family, masked):
        if (family, masked) not in known:
            known[family, masked] = losses_of(family, "1,1,1", *(MASKED if masked else ()))
        return known[family, masked]

    return losses


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param(f, x, marks=() if (f, x) == SHORT else pytest.mark.long)
        for f in FAMILIES
        for x in LAYOUTS
        if not (x[1] == 1 and x[2])  # sequence parallelism splits over tensor
    ],
)
def test_a_layout_has_the_losses_of_one_device(family, layout, one_device):
    stage, tensor, sequence_parallel, masked = layout
    found = losses_of(
        family,
        f"2,{4 // tensor},{tensor}",
        f"parallel.zero_stage={stage}",
        f"parallel.sequence_parallel={sequence_parallel}",
        *(MASKED if masked else ()),
    )
    expected = one_device(family, masked)
    assert expected[-1] < expected[0] - 0.01
    np.testing.assert_allclose(found, expected, rtol=1e-4)


@pytest.mark.long
def test_documents_change_the_losses(one_device):
    assert abs(one_device("llama", True) - one_device("llama", False)).max() > 1e-3
