import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxgpt.config import ModelConfig, OptimizerConfig
from jaxgpt.models.transformer import abstract_params
from jaxgpt.optim.adamw import (
    clip,
    directions,
    init_moments,
    is_decayed,
    learning_rate_schedule,
    update_moments,
)


@pytest.mark.parametrize("step", [1, 50, 99, 100, 101, 1000, 1999, 2000, 5000])
def test_learning_rate_is_linear_then_cosine(step):
    config = OptimizerConfig(learning_rate=1e-3, min_lr=1e-4, warmup_iters=100, lr_decay_iters=2000)
    if step <= 100:
        expected = 1e-3 * step / 100
    else:
        share = min(1.0, (step - 100) / (2000 - 100))
        expected = 1e-4 + 0.5 * (1 + math.cos(math.pi * share)) * (1e-3 - 1e-4)
    assert float(learning_rate_schedule(config)(step)) == pytest.approx(expected, rel=1e-5)


def test_no_warmup_starts_at_the_peak():
    config = OptimizerConfig(learning_rate=1e-3, warmup_iters=0, lr_decay_iters=10)
    assert float(learning_rate_schedule(config)(0)) == pytest.approx(1e-3)
    assert float(learning_rate_schedule(config)(10)) == pytest.approx(1e-4)  # a tenth by default


def test_updates_are_adamws():
    """Against the algorithm in Loshchilov & Hutter (arXiv 1711.05101) with clipping in front."""
    config = OptimizerConfig(weight_decay=0.1, beta1=0.9, beta2=0.95, grad_clip=1.0)
    rng = np.random.default_rng(0)
    params = {"a": {"kernel": rng.normal(size=(3, 2))}, "b": {"bias": rng.normal(size=3)}}
    kept = init_moments(jax.tree.map(jnp.float32, params))
    m = {k: 0.0 for k in "ab"}
    v = {k: 0.0 for k in "ab"}
    for t in range(1, 6):
        grads = {"a": {"kernel": rng.normal(size=(3, 2))}, "b": {"bias": rng.normal(size=3)}}
        norm = math.sqrt(sum((g**2).sum() for g in jax.tree.leaves(grads)))
        clipped = clip(jax.tree.map(jnp.float32, grads), jnp.float32(norm), config.grad_clip)
        kept = update_moments(config, kept, clipped)
        found = directions(config, kept, jax.tree.map(jnp.float32, params))
        for k, name, decay in (("a", "kernel", 0.1), ("b", "bias", 0.0)):
            g = grads[k][name] * min(1.0, 1.0 / norm)
            m[k] = 0.9 * m[k] + 0.1 * g
            v[k] = 0.95 * v[k] + 0.05 * g**2
            adam = (m[k] / (1 - 0.9**t)) / (np.sqrt(v[k] / (1 - 0.95**t)) + 1e-8)
            expected = adam + decay * params[k][name]
            np.testing.assert_allclose(found[k][name], expected, rtol=1e-4, atol=1e-6)
            params[k][name] = params[k][name] - 0.01 * expected


def test_decay_falls_on_matrices_only():
    shapes, _ = abstract_params(ModelConfig(vocab_size=65, bias=True))
    decayed = is_decayed(shapes)
    flat, _ = jax.tree_util.tree_flatten_with_path(decayed)
    names = {jax.tree_util.keystr(path, simple=True, separator="."): on for path, on in flat}
    assert {n for n, on in names.items() if on} == {
        "blocks.qkv.kernel", "blocks.out.kernel", "blocks.up.kernel", "blocks.down.kernel",
        "wte.embedding", "wpe.embedding",
    }  # fmt: skip
    assert names["norm.scale"] is False and names["blocks.qkv.bias"] is False


@pytest.mark.parametrize("scale", [0.0, 0.1, 1.0, 1e3])
@pytest.mark.parametrize("limit", [0.0, 1.0, 2.5])
def test_clipping_is_optaxs(scale, limit):
    gradients = {"a": scale * jnp.array([3.0, 4.0]), "b": scale * jnp.ones((2, 2))}
    reference = optax.clip_by_global_norm(limit) if limit else optax.identity()
    expected, _ = reference.update(gradients, reference.init(gradients))
    found = clip(gradients, optax.tree.norm(gradients), limit)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
