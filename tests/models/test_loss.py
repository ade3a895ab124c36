import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxgpt.config import MeshShape, ModelConfig, load_config, mesh_shape
from jaxgpt.models.loss import OutputLayer, cross_entropy, loss_parts
from jaxgpt.parallel.mesh import make_mesh
from jaxgpt.parallel.tensor import ParallelContext
from jaxgpt.plan.program import COMPILE_ONLY
from jaxgpt.train.jitted import make_steps
from jobs import limited_devices

pytestmark = pytest.mark.usefixtures("exact_products")


@pytest.mark.gpu
def test_cross_entropy_is_the_negative_log_likelihood():
    logits = np.random.default_rng(0).normal(size=(2, 3, 7)) * 3
    targets = np.array([[0, 6, 3], [2, 2, 5]])
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    expected = -np.log(np.take_along_axis(p, targets[..., None], -1))[..., 0]
    padded = np.concatenate([logits, np.full((2, 3, 2), -np.inf)], -1)
    for given in (logits, padded):
        found = cross_entropy(jnp.float32(given), jnp.array(targets))
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    dy = np.arange(6.0).reshape(2, 3)

    def loss(x):
        return (dy * cross_entropy(x, jnp.array(targets))).sum()

    gradient = jax.grad(loss)(jnp.float32(padded))
    expected = dy[..., None] * (p - (targets[..., None] == np.arange(7)))
    np.testing.assert_allclose(gradient[..., :7], expected, rtol=1e-5, atol=1e-6)
    assert (gradient[..., 7:] == 0).all()


@pytest.mark.gpu
def test_cross_entropy_of_large_logits_does_not_overflow():
    logits = jnp.array([[[1e4, 0.0, -1e4]]])
    assert cross_entropy(logits, jnp.array([[0]])) == 0
    assert cross_entropy(logits, jnp.array([[2]])) == 2e4


def test_a_device_may_hold_only_padding_of_the_vocabulary():
    """Eight devices have two of 16 logits each, and those of the last four are padding."""
    logits = np.random.default_rng(0).normal(size=(2, 3, 7))
    targets = np.array([[0, 6, 3], [2, 2, 5]])
    expected = np.log(np.exp(logits).sum(-1))
    expected -= np.take_along_axis(logits, targets[..., None], -1)[..., 0]
    parallel = ParallelContext(tensor=8, tensor_axes=("tensor",))

    @jax.shard_map(
        mesh=make_mesh(MeshShape(1, 1, 8)),
        in_specs=(PartitionSpec(None, None, "tensor"), PartitionSpec()),
        out_specs=PartitionSpec(),
    )
    def losses(logits, targets):
        return cross_entropy(logits, targets, 2 * jax.lax.axis_index("tensor"), parallel)

    padded = np.pad(logits, ((0, 0), (0, 0), (0, 9)), constant_values=-np.inf)
    found = losses(jnp.float32(padded), jnp.array(targets))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 100])
@pytest.mark.gpu
def test_a_loss_in_chunks_is_the_loss_at_once(chunk):
    B, T, D, V = 2, 6, 5, 11
    keys = jax.random.split(jax.random.key(0), 3)
    x, w = jax.random.normal(keys[0], (B, T, D)), jax.random.normal(keys[1], (128, D))
    targets = jax.random.randint(keys[2], (B, T), 0, V)

    weights = jax.random.uniform(keys[2], (B, T)).at[1, 2:].set(0)

    def loss(x, w, chunk):
        output = OutputLayer(w, 0, ModelConfig(vocab_size=V))
        return 3 * loss_parts(x, targets, weights, output, chunk).loss

    whole = jax.value_and_grad(loss, argnums=(0, 1))(x, w, 0)
    found = jax.value_and_grad(loss, argnums=(0, 1))(x, w, chunk)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(loss(x, w, chunk), whole[0], rtol=1e-6)  # as in an evaluation


@pytest.mark.parametrize("chunk", [11, 8, 5, 3])
def test_chunks_are_as_even_as_they_get(chunk):
    x, w, targets = jnp.ones((2, 6, 5)), jnp.ones((128, 5)), jnp.zeros((2, 6), jnp.int32)

    def loss(x, w):
        output = OutputLayer(w, 0, ModelConfig(vocab_size=11))
        return loss_parts(x, targets, jnp.ones((2, 6)), output, chunk).loss

    program = jax.make_jaxpr(loss)
    parts = -(-12 // chunk)
    assert f"f32[{parts},{12 // parts},5]" in str(program(x, w))


@pytest.mark.parametrize(
    ("mesh", "options", "parts"),
    [
        ("1,1,1", (), 1),
        ("1,1,4", (), 4),
        ("1,1,4", ("parallel.sequence_parallel=True",), 4),
        ("1,1,1", ("train.loss_chunk=2048",), 8),
        ("1,1,4", ("train.loss_chunk=2048",), 32),
    ],
)
def test_logits_exist_only_in_parts(mesh, options, parts):
    """With `tensor` or train.loss_chunk, no device ever holds all (B, T, V) logits at once."""
    config = load_config(
        "tiny", "model.n_layer=1", "model.n_embd=64", "model.vocab_size=50304",
        "model.block_size=1024", "train.batch_size=16", "--mesh", mesh, *options,
    )  # fmt: skip
    sizes = mesh_shape(config)
    with limited_devices(sizes.n_devices):
        steps = make_steps(config, make_mesh(sizes), slices=1)  # a whole microbatch at once
    compiled = steps.lower_train_step().compile(COMPILE_ONLY)
    arrays = re.findall(r"\b[a-z]+[0-9]+\[([0-9,]+)\]", compiled.as_text())
    largest = max(math.prod(map(int, dims.split(","))) for dims in arrays)
    tables_and_scores = max(50304 * 64, 16 * 4 // sizes["tensor"] * 1024**2)
    assert largest == max(16 * 1024 * 50304 // parts, tables_and_scores)
