"""Text from a model, one token after the other."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.data.tokenizer import Tokenizer
from jaxgpt.parallel.sharding import Params
from jaxgpt.train.state import Read

PIECE = 128  # tokens of a prompt that are read at once


def make_generate(
    reader: Callable[[Params], tuple[Read, Any]],
    vocab_size: int,
    n_tokens: int,
    temperature: float,
    top_k: int | None,
) -> Callable[[Params, jax.Array, jax.Array, jax.Array], jax.Array]:
    """A function that writes `n_tokens` tokens, to be jitted once by the caller.

    The prompt is read in pieces, and then each token alone, beside a cache of the keys and values
    before it. As in nanoGPT, a text longer than T is cropped to its last T tokens. These move by
    one position with each new token, and positions are learned, so that no cache holds any more:
    from there on all T are read for every token.

    Args:
        reader: `StepFunctions.reader`.
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
        T, P, end = window.size, min(PIECE, window.size), length + n_tokens
        keys = jax.random.split(jax.random.key(seed), n_tokens)
        read, empty_caches = reader(params)

        def part(text: jax.Array, first: jax.Array, size: int) -> jax.Array:
            return jax.lax.dynamic_slice(text, (first,), (size,))[None]

        def written(text: jax.Array, n: jax.Array, logits_1V: jax.Array) -> jax.Array:
            return text.at[n].set(draw(logits_1V[0], keys[n - length]))

        def read_piece(i, caches):
            first = jnp.minimum(i * P, T - P)  # the last may begin in the one before
            return read(caches, part(window, first, P), first)[1]

        def write_next(carry):
            text, n, caches = carry
            logits_1V, caches = read(caches, part(text, n - 1, 1), n - 1)
            return written(text, n, logits_1V), n + 1, caches

        def write_past_window(carry):
            text, n = carry
            logits_1V, _ = read(empty_caches, part(text, n - T, T), 0)
            return written(text, n, logits_1V), n + 1

        # What follows the prompt is read too, and overwritten before anything attends to it.
        caches = jax.lax.fori_loop(0, -(-length // P), read_piece, empty_caches)
        text = jnp.concatenate([window, jnp.zeros(n_tokens, jnp.int32)])
        text, n, _ = jax.lax.while_loop(
            lambda carry: carry[1] < jnp.minimum(end, T + 1), write_next, (text, length, caches)
        )
        text, _ = jax.lax.while_loop(lambda carry: carry[1] < end, write_past_window, (text, n))
        return jax.lax.dynamic_slice(text, (length,), (n_tokens,))

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
