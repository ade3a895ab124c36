import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.config import UsageError
from jaxgpt.data.tokenizer import CharTokenizer
from jaxgpt.training.sampling import make_generate, prompt_window

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


def test_a_prompt_is_cut_to_the_window():
    tokenizer = CharTokenizer("abc")
    window, length = prompt_window(tokenizer, "abcabc", 4)
    assert (window.tolist(), length) == ([2, 0, 1, 2], 4)
    window, length = prompt_window(tokenizer, "b", 4)
    assert (window.tolist(), length) == ([1, 0, 0, 0], 1)
    assert prompt_window(tokenizer, "", 4)[1] == 1
    with pytest.raises(UsageError, match="'x'"):
        prompt_window(tokenizer, "x", 4)
