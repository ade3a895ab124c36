import functools
import re

import jax
import jax._src.cudnn.fused_attention_stablehlo as kernels
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxgpt.config import MeshShape, load_config, mesh_shape
from jaxgpt.data.batch import TokenRows, make_batch
from jaxgpt.kernels.attention import xla_attention
from jaxgpt.models.attention import KERNELS, AttentionSetting
from jaxgpt.models.mlp import MLP, MLPS, gelu
from jaxgpt.models.transformer import gpt_graph
from jaxgpt.optim import update as update_module
from jaxgpt.optim.update import clip_by_norm
from jaxgpt.parallel.mesh import make_mesh
from jaxgpt.train.jitted import make_steps, step_options
from jaxgpt.train.sharded_model import shard_model
from jaxgpt.train.step import loss_and_gradients
from jobs import trace

pytestmark = pytest.mark.usefixtures("layouts_fit")

ARGUMENTS = (
    "shakespeare_char_cpu",
    "data.dataset=python",
    "model.n_layer=2",
    "model.n_embd=64",
    "train.batch_size=16",
)


@pytest.fixture(scope="module")
def with_dropout():
    """The trace of a run on one device."""
    return trace(3, *ARGUMENTS, "model.dropout=0.3", "--mesh", "1,1,1", devices=1)


@pytest.mark.long
@pytest.mark.parametrize(
    "layout",
    [
        ("2,1,4",),
        ("1,8,1", "train.gradient_accumulation_steps=2"),
        ("2,2,2", "parallel.sequence_parallel=True"),
        ("1,2,4", "parallel.sequence_parallel=True", "parallel.remat=full"),
    ],
)
def test_dropout_is_the_same_on_every_mesh(layout, with_dropout):
    found = trace(3, *ARGUMENTS, "model.dropout=0.3", "--mesh", *layout)
    np.testing.assert_allclose(found["losses"], with_dropout["losses"], rtol=1e-4)


def test_the_gradient_of_a_frequent_token_is_not_rounded_away():
    """One token occurs 2,048 times; in bfloat16, 256 + 1 is 256."""
    rows, gradient = np.full((32, 65), 7, np.int32), {}
    for dtype in ("float32", "bfloat16"):
        config = load_config(*ARGUMENTS, "model.vocab_size=256", f"train.dtype={dtype}")
        mesh = make_mesh(MeshShape(8))
        model = shard_model(config, mesh, xla_attention)
        params = make_steps(config, mesh).init().params
        compute = jax.jit(functools.partial(loss_and_gradients, model))
        _, gradients = compute(params, np.int32(1), make_batch(rows))
        gradient[dtype] = np.asarray(gradients["token_embedding"]["embedding"])[7]
    difference = np.linalg.norm(gradient["bfloat16"] - gradient["float32"])
    assert difference <= 0.02 * np.linalg.norm(gradient["float32"])


class BalancedMLP(MLP):
    """An MLP with an auxiliary loss of each row, as experts have one that balances their load."""

    def __init__(self, build):
        super().__init__(gelu, build)

    def __call__(self, x_BTD):
        y_BTD, _ = super().__call__(x_BTD)
        return y_BTD, {"size": jnp.square(y_BTD).sum((1, 2))}


@pytest.mark.parametrize(
    "layout",
    [
        (MeshShape(tensor=4, stage=2), "train.gradient_accumulation_steps=4"),
        (MeshShape(2, 2, 2), "train.gradient_accumulation_steps=2", "parallel.scan_layers=True"),
        (MeshShape(4, 2, 1), "model.layers=local global global", "model.sliding_window=8"),
    ],
)
def test_auxiliary_losses_of_the_blocks_are_differentiated(layout, monkeypatch):
    """Against JAX's gradient of the sum of both losses, on one device."""
    monkeypatch.setitem(MLPS, "balanced", BalancedMLP)
    shape, *words = layout
    words += ["model.mlp=balanced", "model.vocab_size=256", "model.n_head=8", "model.n_layer=5"]
    config, mesh = load_config(*ARGUMENTS, *words), make_mesh(shape)
    draw = np.random.default_rng(0).integers
    mask = draw(2, size=(16, 65), dtype=np.uint8)
    batch = make_batch(TokenRows(draw(256, size=(16, 65), dtype=np.int32), mask))
    params = make_steps(config, mesh).init().params
    compute = jax.jit(functools.partial(loss_and_gradients, shard_model(config, mesh, None)))
    rows, gradients = compute(params, np.int32(1), batch)

    def both_losses(params):
        network = nnx.merge(gpt_graph(config.model), params)
        x_BTD, aux = network.run_blocks(network.embed(batch), batch)
        loss = network.head_loss(x_BTD, batch).loss / batch.weights.sum()
        return loss + aux["size"].sum() / batch.targets.size, aux["size"]

    expected, aux_B = jax.jit(jax.grad(both_losses, has_aux=True))(jax.device_get(params))
    np.testing.assert_allclose(rows["size"], aux_B, rtol=1e-5)
    for found, right in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(found - right) <= 1e-5 * np.linalg.norm(right)


def test_what_is_written_for_cpus_and_for_gpus_computes_the_same():
    config = load_config(*ARGUMENTS, "model.vocab_size=256", "model.dropout=0.1", "model.bias=True")
    mesh = make_mesh(MeshShape(2, 2, 2))
    rows = np.random.default_rng(0).integers(256, size=(16, 65), dtype=np.int32)
    params = make_steps(config, mesh).init().params
    found = []
    for on_cpu in (True, False):
        model = shard_model(config, mesh, xla_attention, on_cpu=on_cpu)
        compute = jax.jit(functools.partial(loss_and_gradients, model))
        found.append(compute(params, np.int32(1), make_batch(rows)))
    for for_cpus, for_gpus in zip(*map(jax.tree.leaves, found), strict=True):
        difference = np.linalg.norm(for_gpus - for_cpus)
        assert difference <= 1e-5 * np.linalg.norm(for_cpus)


@pytest.mark.long
def test_training_in_bfloat16_follows_float32():
    exact = trace(20, *ARGUMENTS, "--mesh", "8,1,1")["losses"]
    rounded = trace(20, *ARGUMENTS, "--mesh", "8,1,1", "train.dtype=bfloat16")["losses"]
    np.testing.assert_allclose(rounded, exact, rtol=1e-2)
    assert rounded != exact


@pytest.mark.parametrize(
    "layout",
    [
        ("8,1,1",),
        ("1,8,1", "parallel.remat=full"),
        ("2,1,4", "parallel.sequence_parallel=True", "parallel.scan_layers=True"),
        ("2,2,2", "parallel.scan_layers=None"),  # loops on CPUs only
    ],
)
def test_a_step_with_cudnn_s_attention_is_lowered_for_nvidias_gpus(layout, monkeypatch):
    text = lowered_for_cuda(monkeypatch, "--mesh", *layout)
    n_forward = 2 if "parallel.remat=full" in layout else 1
    n_layers = 1 if "parallel.scan_layers=True" in layout else 2
    assert text.count("@__cudnn$fmhaSoftmaxBackward(") == n_layers
    assert text.count("@__cudnn$fmhaSoftmax(") == n_layers * n_forward
    # The rows first, as they come: see where the model adds positions.
    assert re.search(r"@LayoutConstraint\(.*result_layouts = \[dense<\[2, 1, 0\]>", text)


def test_deterministic_kernels_have_scales_of_their_own(monkeypatch):
    """XLA may merge identical calls; the scales differ, but not after rounding to float32."""
    text = lowered_for_cuda(monkeypatch, "--mesh", "2,2,2", "train.deterministic=True")
    calls = [line for line in text.splitlines() if "@__cudnn$fmhaSoftmaxBackward(" in line]
    scales = [float(s) for line in calls for s in re.findall(r"fmha_scale\\22: ([\d.]+)", line)]
    assert len(scales) == len(set(scales)) == 2
    assert len(set(np.float32(scales))) == 1


def lowered_for_cuda(monkeypatch, *words):
    """Lower the train step for CUDA without a GPU, by patching what JAX asks of the device."""
    monkeypatch.setattr(kernels, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(kernels, "check_compute_capability", lambda capability: True)
    monkeypatch.setattr(kernels, "is_cuda_compute_capability_equal", lambda other: other == "9.0")
    config = load_config(*ARGUMENTS, "model.vocab_size=256", "train.dtype=bfloat16", *words)
    deterministic = config.train.deterministic
    setting = AttentionSetting(config.model, "bfloat16", "gpu", 9.0, deterministic=deterministic)
    attend = KERNELS["cudnn"].make(setting)
    steps = make_steps(config, make_mesh(mesh_shape(config)), attend=attend, on_cpu=False)
    operands = (
        steps.state_shapes,
        jax.ShapeDtypeStruct((), np.int32, sharding=steps.replicated),
        jax.ShapeDtypeStruct((), np.float32, sharding=steps.replicated),
        steps.batch_shape,
    )
    return steps.train_step.trace(*operands).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("platform", "n_devices"), [("gpu", 8), ("gpu", 1), ("cpu", 1), ("tpu", 4)]
)
def test_xla_knows_the_options_of_a_step(platform, n_devices):
    """XLA rejects unknown option names on every platform."""
    options = step_options(load_config("tiny"), platform, n_devices)
    compiled = jax.jit(lambda x: x + 1, compiler_options=options).lower(1.0).compile()
    assert float(compiled(1.0)) == 2.0
    assert bool(options) == (platform == "cpu" or (platform, n_devices) == ("gpu", 8))


def test_what_xla_flags_say_of_an_option_of_a_step_counts(monkeypatch):
    name = "xla_gpu_exclude_nondeterministic_ops"
    config = load_config("tiny", "train.deterministic=True")
    assert step_options(config, "gpu", 1) == {name: True}
    assert step_options(load_config("tiny"), "gpu", 1) is None
    monkeypatch.setenv("XLA_FLAGS", f"--xla_gpu_enable_latency_hiding_scheduler=false --{name}=0")
    assert step_options(config, "gpu", 8) is None
    assert step_options(config, "cpu", 1)


@pytest.mark.parametrize("scale", [0.0, 0.1, 1.0, 1e3])
@pytest.mark.parametrize("limit", [0.0, 1.0, 2.5])
def test_clipping_is_optaxs(scale, limit):
    gradients = {"a": scale * jnp.array([3.0, 4.0]), "b": scale * jnp.ones((2, 2))}
    reference = optax.clip_by_global_norm(limit) if limit else optax.identity()
    expected, _ = reference.update(gradients, reference.init(gradients))
    found = clip_by_norm(gradients, optax.tree.norm(gradients), limit)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_leaving_an_update_out_takes_no_copy_of_the_state(monkeypatch):
    """Compare with a step that always updates, and so could not reject a NaN update."""
    mesh = make_mesh(MeshShape(1, 8, 1))
    config = load_config(*ARGUMENTS, "model.vocab_size=256", "spike.action=skip_update")

    def temporaries():
        compiled = make_steps(config, mesh).lower_train_step().compile()
        return compiled.memory_analysis().temp_size_in_bytes

    gated = temporaries()
    monkeypatch.setattr(
        update_module, "gate_sequentially", lambda is_due, update, *old: update(*old)
    )
    assert gated <= temporaries() + 10_000
