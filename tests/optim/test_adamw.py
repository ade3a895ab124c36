import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.config import ModelConfig, OptimizerConfig, UsageError
from jaxgpt.models.weights import Weight, weights
from jaxgpt.optim import make_optimizer
from jaxgpt.optim.parameters import Parameters
from jaxgpt.optim.update import clip_by_norm

PARAMETERS = Parameters(
    {
        "a": {"kernel": Weight("a/kernel", (3, 2), ("embed", "mlp"), "matrix", 1)},
        "b": {"bias": Weight("b/bias", (3,), (None,), "bias")},
    }
)


@pytest.mark.parametrize("eps", [1e-8, 1e-1])
def test_updates_are_adamws(eps):
    """Compare with the algorithm in Loshchilov & Hutter (arXiv 1711.05101), after clipping."""
    config = OptimizerConfig(weight_decay=0.1, beta1=0.9, beta2=0.95, eps=eps, grad_clip=1.0)
    rng = np.random.default_rng(0)
    params = {"a": {"kernel": rng.normal(size=(3, 2))}, "b": {"bias": rng.normal(size=3)}}
    optimizer = make_optimizer(config, PARAMETERS)
    state = optimizer.init(jax.tree.map(jnp.float32, params))
    m = {k: 0.0 for k in "ab"}
    v = {k: 0.0 for k in "ab"}
    for t in range(1, 6):
        grads = {"a": {"kernel": rng.normal(size=(3, 2))}, "b": {"bias": rng.normal(size=3)}}
        norm = math.sqrt(sum((g**2).sum() for g in jax.tree.leaves(grads)))
        clipped = clip_by_norm(
            jax.tree.map(jnp.float32, grads), jnp.float32(norm), config.grad_clip
        )
        found, state = optimizer.update(clipped, state, jax.tree.map(jnp.float32, params))
        for k, name, decay in (("a", "kernel", 0.1), ("b", "bias", 0.0)):
            g = grads[k][name] * min(1.0, 1.0 / norm)
            m[k] = 0.9 * m[k] + 0.1 * g
            v[k] = 0.95 * v[k] + 0.05 * g**2
            adam = (m[k] / (1 - 0.9**t)) / (np.sqrt(v[k] / (1 - 0.95**t)) + eps)
            expected = adam + decay * params[k][name]
            np.testing.assert_allclose(found[k][name], expected, rtol=1e-4, atol=1e-6)
            params[k][name] = params[k][name] - 0.01 * expected


def test_decay_falls_on_matrices_only():
    decayed = Parameters(weights(ModelConfig(vocab_size=65, bias=True))).is_decayed
    flat, _ = jax.tree_util.tree_flatten_with_path(decayed)
    names = {jax.tree_util.keystr(path, simple=True, separator="."): on for path, on in flat}
    assert {n for n, on in names.items() if on} == {
        "layers.attention.qkv.kernel", "layers.attention.out.kernel",
        "layers.mlp.up.kernel", "layers.mlp.down.kernel",
        "token_embedding.embedding", "position_embedding.embedding",
    }  # fmt: skip
    assert names["norm.scale"] is False and names["layers.attention.qkv.bias"] is False


def test_an_unknown_optimizer_is_one_sentence():
    with pytest.raises(UsageError, match="optimizer.name=adamv: must be one of .*adamw"):
        make_optimizer(OptimizerConfig(name="adamv"), Parameters({}))
