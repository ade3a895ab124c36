"""Text from a model, one token after the other."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.data.tokenizer import Tokenizer
from jaxgpt.distributed.partition import Params


def make_generate(
    logits: Callable[[Params, jax.Array], jax.Array],
    block_size: int,
    vocab_size: int,
    n_tokens: int,
    temperature: float,
    top_k: int | None,
) -> Callable[[Params, jax.Array, jax.Array, jax.Array], jax.Array]:
    """A function that writes `n_tokens` tokens, to be jitted once by the caller.

    Args:
        logits: (params, tokens_BT) -> logits_BTV.
        block_size: T; older tokens than these are forgotten.
        vocab_size: of the tokenizer; a model may have been given room for more.
        temperature: logits are divided by it; 0 always takes the likeliest token.
        top_k: only so many of the likeliest tokens are drawn from; None means all.

    Returns:
        (params, window, length, seed) -> tokens of shape (n_tokens,), where window is (T,) token
        ids of which the first `length` are the prompt.
    """

    def draw(logits_V: jax.Array, key: jax.Array) -> jax.Array:
        logits_V = logits_V[:vocab_size]
        if temperature == 0:
            return jnp.argmax(logits_V)
        if top_k is not None:
            least = jax.lax.top_k(logits_V, min(top_k, logits_V.size))[0][-1]
            logits_V = jnp.where(logits_V < least, -jnp.inf, logits_V)
        return jax.random.categorical(key, logits_V / temperature)

    def generate(params: Params, window: jax.Array, length: jax.Array, seed: jax.Array):
        def one(carry, key):
            window_T, length = carry
            token = draw(logits(params, window_T[None])[0, length - 1], key).astype(jnp.int32)
            is_full = length == block_size
            window_T = jnp.where(is_full, jnp.roll(window_T, -1), window_T)
            length = jnp.where(is_full, length, length + 1)
            return (window_T.at[length - 1].set(token), length), token

        return jax.lax.scan(
            one, (window, length), jax.random.split(jax.random.key(seed), n_tokens)
        )[1]

    return generate


def prompt_window(tokenizer: Tokenizer, prompt: str, block_size: int) -> tuple[np.ndarray, int]:
    """A prompt's last `block_size` tokens, padded to that length, and how many there are.

    An empty prompt is the end of a text, or token 0 where there is none.

    Raises:
        UsageError: if the prompt has a character that the vocabulary has not.
    """
    tokens = tokenizer.encode(prompt)[-block_size:] if prompt else [tokenizer.end_of_text or 0]
    window = np.zeros(block_size, np.int32)
    window[: len(tokens)] = tokens
    return window, len(tokens)
