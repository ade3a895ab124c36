"""Text generation: fill the KV cache with the prompt, then decode one token at a time."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.config import Sampling
from jaxgpt.data.tokenizers import Tokenizer, prompt_tokens
from jaxgpt.models.decode import PREFILL_CHUNK
from jaxgpt.parallel.sharding import Params
from jaxgpt.train.inference import DecodeFn


class Text(NamedTuple):
    """A partially generated sequence."""

    tokens_S: jax.Array  # int32 (S,): the prompt, the generated tokens, then padding
    n: jax.Array  # int32 scalar: number of tokens before the padding
    caches: Any  # KV caches; see `Generator`


class Generator(NamedTuple):
    """Two functions that generate one sequence; use `jax.vmap` for several sequences.

    The prompt is written to the KV cache in chunks. After that, tokens are decoded one at a time.
    The sequence may grow beyond model.block_size. With rotary positions, global layers attend to
    the cached keys and values of the last model.block_size tokens. With learned positions, each
    token beyond model.block_size shifts the positions of all others, which invalidates the cache.
    As in nanoGPT, the last model.block_size tokens are then recomputed for each new token.
    """

    start: Callable[[Params, jax.Array, jax.Array], Text]
    """(params, window, length) -> the prompt as a `Text`.

    `window` is int32 (P,) and contains the prompt of `length` tokens, then padding. P is at most
    model.block_size, and `length` is at least 1.
    """
    extend: Callable[[Params, Text, jax.Array, Any, Any, Any], Text]
    """(params, text, seed, first, n_cached, end) -> `text` with more generated tokens.

    Each call generates tokens `first` to `end` - 1, where token 0 is the first token after the
    prompt. `first` is the number of tokens generated so far, and `end` is at most `n_tokens`. Token
    i is drawn with a key derived from `seed` and i, so it does not depend on the number of calls.
    With learned positions, only the first `n_cached` tokens are generated with the KV cache.
    `n_cached` is the result of `cached_tokens` for the longest prompt.
    """


def make_generator(
    make_decoder: Callable[[Params], tuple[DecodeFn, Any]],
    n_positions: int | None,
    vocab_size: int,
    n_tokens: int,
    sampling: Sampling,
) -> Generator:
    """Return the functions that generate up to `n_tokens` tokens; the caller should jit them once.

    Args:
        make_decoder: params -> (decode function, empty KV cache); see `JittedFunctions`.
        n_positions: `ModelConfig.n_positions`, which is block_size with learned positions and None
            with RoPE.
        vocab_size: vocabulary size of the tokenizer; the model's vocabulary may be larger.
        n_tokens: maximum number of tokens to generate.
        sampling: how each token is chosen.
    """

    def start(params: Params, window: jax.Array, length: jax.Array) -> Text:
        decode, empty_caches = make_decoder(params)
        caches = prefill(decode, empty_caches, window, length)
        return Text(jnp.concatenate([window, jnp.zeros(n_tokens, jnp.int32)]), length, caches)

    def extend(
        params: Params, text: Text, seed: jax.Array, first: Any, n_cached: Any, end: Any
    ) -> Text:
        decode, empty_caches = make_decoder(params)
        T = n_positions

        def append(text: Text, i: jax.Array, logits_1V: jax.Array, caches: Any) -> Text:
            key = jax.random.fold_in(jax.random.key(seed), i)
            token = draw_token(logits_1V[0, :vocab_size], key, sampling)
            return Text(text.tokens_S.at[text.n].set(token), text.n + 1, caches)

        def decode_step(carry: Any) -> Any:
            i, text = carry
            newest = tokens_1N(text.tokens_S, text.n - 1, 1)
            return i + 1, append(text, i, *decode(text.caches, newest, text.n - 1))

        def recompute_step(carry: Any) -> Any:
            i, text = carry
            context = tokens_1N(text.tokens_S, jnp.maximum(text.n - T, 0), T)
            # In a batch, some sequences may still be shorter than T.
            logits_1V, _ = decode(empty_caches, context, 0, jnp.minimum(text.n, T) - 1)
            return i + 1, append(text, i, logits_1V, text.caches)

        last_cached = end if T is None else jnp.minimum(n_cached, end)
        carry = jax.lax.while_loop(
            lambda carry: carry[0] < last_cached, decode_step, (jnp.int32(first), text)
        )
        if T is not None and text.tokens_S.size > T:
            carry = jax.lax.while_loop(lambda carry: carry[0] < end, recompute_step, carry)
        return carry[1]

    return Generator(start, extend)


def make_generate(
    make_decoder: Callable[[Params], tuple[DecodeFn, Any]],
    n_positions: int | None,
    vocab_size: int,
    n_tokens: int,
    sampling: Sampling,
) -> Callable[[Params, jax.Array, jax.Array, jax.Array], jax.Array]:
    """Return a function (params, window, length, seed) -> generated token IDs, int32 (n_tokens,).

    The caller should jit it once. See `Generator` and `make_generator` for the arguments.
    """
    start, extend = make_generator(make_decoder, n_positions, vocab_size, n_tokens, sampling)

    def generate(params: Params, window: jax.Array, length: jax.Array, seed: jax.Array):
        text, n_cached = start(params, window, length), cached_tokens(n_positions, length)
        text = extend(params, text, seed, 0, n_cached, n_tokens)
        return jax.lax.dynamic_slice(text.tokens_S, (length,), (n_tokens,))

    return generate


def cached_tokens(n_positions: int | None, length: Any) -> Any:
    """Return how many tokens can be generated with the KV cache after a prompt of `length` tokens.

    With RoPE (`n_positions` is None), there is no limit, and the result is 2^31 - 1.
    """
    return np.iinfo(np.int32).max if n_positions is None else n_positions + 1 - length


def prefill(decode: DecodeFn, caches: Any, window: jax.Array, length: jax.Array) -> Any:
    """Return the KV caches for the first `length` tokens of `window`, computed in chunks.

    `window` is int32 (P,), and P is at most model.block_size. The last chunk may include padding.
    The cache entries of the padding are overwritten before any token attends to them.
    """
    P = min(PREFILL_CHUNK, window.size)

    def read_chunk(i: jax.Array, caches: Any) -> Any:
        first = jnp.minimum(i * P, window.size - P)  # the last chunk may overlap the previous chunk
        return decode(caches, tokens_1N(window, first, P), first)[1]

    return jax.lax.fori_loop(0, -(-length // P), read_chunk, caches)


def tokens_1N(text: jax.Array, first: jax.Array, size: int) -> jax.Array:
    """Return the `size` tokens of `text` (S,) that start at index `first`, with shape (1, size).

    `first` is at most S - `size`.
    """
    return jax.lax.dynamic_slice(text, (first,), (size,))[None]


def draw_token(logits_V: jax.Array, key: jax.Array, sampling: Sampling) -> jax.Array:
    """Draw a token ID as specified by `sampling`. Returns an int32 scalar."""
    if sampling.temperature == 0:
        return jnp.argmax(logits_V)
    return jax.random.categorical(key, limit_choice(logits_V, sampling))


def limit_choice(logits_V: jax.Array, sampling: Sampling) -> jax.Array:
    """Return logits / temperature (V,), with -inf for the tokens that `sampling` excludes.

    The temperature must be positive.
    """
    if sampling.top_k is not None:
        least = jax.lax.top_k(logits_V, min(sampling.top_k, logits_V.size))[0][-1]
        logits_V = jnp.where(logits_V < least, -jnp.inf, logits_V)
    logits_V = logits_V / sampling.temperature
    if sampling.top_p is not None:
        ranked_V = jnp.sort(logits_V, descending=True)
        p_V = jax.nn.softmax(ranked_V)
        before_V = jnp.cumsum(p_V) - p_V  # total probability of the more likely tokens
        least = jnp.min(jnp.where(before_V < sampling.top_p, ranked_V, jnp.inf))
        logits_V = jnp.where(logits_V < least, -jnp.inf, logits_V)
    if sampling.min_p is not None:
        least = logits_V.max() + jnp.log(sampling.min_p)
        logits_V = jnp.where(logits_V < least, -jnp.inf, logits_V)
    return logits_V


def prompt_window(tokenizer: Tokenizer, prompt: str, block_size: int) -> tuple[np.ndarray, int]:
    """Return the last `block_size` tokens of a prompt (see `prompt_tokens`) and how many there are.

    The tokens are int32 (P,). They are padded to a multiple of `PREFILL_CHUNK`, but not beyond
    `block_size`, so that prompts of similar lengths share a compiled function. The count excludes
    the padding.
    """
    tokens = prompt_tokens(tokenizer, prompt)[-block_size:]
    padded = -(-len(tokens) // PREFILL_CHUNK) * PREFILL_CHUNK
    window = np.zeros(min(block_size, padded), np.int32)
    window[: len(tokens)] = tokens
    return window, len(tokens)
