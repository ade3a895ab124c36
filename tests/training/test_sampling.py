import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.config import UsageError, load_config
from jaxgpt.data.tokenizer import CharTokenizer
from jaxgpt.distributed.mesh import make_mesh
from jaxgpt.training import step
from jaxgpt.training.sampling import make_generate, prompt_window
from jaxgpt.training.step import make_steps
from jobs import limited_devices

V = 11


def counting_logits(params, tokens):
    """A model that is sure that the next token is the sum of the last two, modulo V."""
    before = jnp.pad(tokens, ((0, 0), (1, 0)))[:, :-1]
    return params * jax.nn.one_hot((tokens + before) % V, V)


def generate(prompt, n, block_size=6, temperature=0.0, top_k=None, sharpness=100.0):
    window = np.zeros(block_size, np.int32)
    window[: len(prompt)] = prompt
    made = jax.jit(make_generate(counting_logits, block_size, V, n, temperature, top_k))
    return np.asarray(made(sharpness, window, np.int32(len(prompt)), np.int32(0))).tolist()


def fibonacci(a, b, n):
    out = []
    for _ in range(n):
        a, b = b, (a + b) % V
        out.append(b)
    return out


def test_each_token_follows_from_those_before_it():
    assert generate([1, 1], 20) == fibonacci(1, 1, 20)  # longer than the window


@pytest.mark.parametrize("options", [{"temperature": 1.0}, {"temperature": 5.0, "top_k": 1}])
def test_a_sure_model_or_a_single_candidate_leaves_no_choice(options):
    assert generate([2, 3], 15, **options) == fibonacci(2, 3, 15)


def test_an_indifferent_model_draws_all_tokens_alike():
    drawn = generate([1, 1], 2000, temperature=1.0, sharpness=0.0)
    assert np.bincount(drawn, minlength=V).min() > 2000 / V / 2


def ranked_logits(params, tokens):
    """A model that prefers larger tokens a little, whatever came before."""
    return jnp.broadcast_to(jnp.arange(V) / 10, (*tokens.shape, V))


@pytest.mark.parametrize("k", [1, 3, V, 100])
def test_top_k_limits_the_choice(k):
    made = jax.jit(make_generate(ranked_logits, 6, V, 1000, 1.0, k))
    drawn = np.asarray(made(0, np.zeros(6, np.int32), np.int32(1), np.int32(0)))
    assert set(drawn.tolist()) == set(range(max(0, V - k), V))


def test_tokens_that_the_tokenizer_lacks_are_not_drawn():
    made = jax.jit(make_generate(ranked_logits, 6, 5, 1000, 1.0, None))
    drawn = np.asarray(made(0, np.zeros(6, np.int32), np.int32(1), np.int32(0)))
    assert set(drawn.tolist()) == set(range(5))


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("2,2,2", ("parallel.sequence_parallel=True", "model.dropout=0.5")),
        ("1,2,3", ("model.n_head=6", "model.n_embd=60")),  # does not divide the vocabulary
    ],
)
def test_a_model_too_large_for_one_device_writes_the_same(mesh, options, monkeypatch):
    """Its logits are computed where its parameters are."""
    sizes = tuple(int(size) for size in mesh.split(","))
    config = load_config("tiny", "model.vocab_size=65", "--mesh", mesh, *options)
    with limited_devices(math.prod(sizes)):
        steps = make_steps(config, make_mesh(sizes))
    params, tokens = steps.init().params, jnp.arange(5)[None]
    gathered = jax.jit(steps.sample_logits)(params, tokens)
    monkeypatch.setattr(step, "GATHERED_BYTES", 0)
    computed_apart = jax.jit(lambda *given: steps.sample_logits(*given))(params, tokens)
    assert computed_apart.shape == gathered.shape == (1, 5, 128)
    np.testing.assert_allclose(computed_apart, gathered, atol=1e-5)


def test_a_prompt_is_cut_to_the_window():
    tokenizer = CharTokenizer("abc")
    window, length = prompt_window(tokenizer, "abcabc", 4)
    assert (window.tolist(), length) == ([2, 0, 1, 2], 4)
    window, length = prompt_window(tokenizer, "b", 4)
    assert (window.tolist(), length) == ([1, 0, 0, 0], 1)
    assert prompt_window(tokenizer, "", 4)[1] == 1
    with pytest.raises(UsageError, match="'x'"):
        prompt_window(tokenizer, "x", 4)
