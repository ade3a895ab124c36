"""Evaluation during training: losses on both splits, and sampled text."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.config import Config
from jaxgpt.data.batch import TokenRows
from jaxgpt.data.dataset import Dataset
from jaxgpt.data.loader import Loader
from jaxgpt.data.source import SPLITS
from jaxgpt.data.tokenizers import Tokenizer, continue_prompt
from jaxgpt.models.decode import PREFILL_CHUNK
from jaxgpt.parallel.sharding import Params
from jaxgpt.runtime.dispatch import DispatchLimiter
from jaxgpt.tracking.records import EvalRecord, SampleRecord
from jaxgpt.train.compiled import CompiledFunctions
from jaxgpt.train.inference import DecodeFn
from jaxgpt.train.reporting.metrics import corpus_means

SAMPLE_TEMPERATURE = 0.8
SAMPLE_TOP_K = 200  # as in nanoGPT


def make_evaluator(
    dataset: Dataset, config: Config, steps: CompiledFunctions, heartbeat: Callable[[str], None]
) -> Callable[[int, Params], EvalRecord]:
    """Return a function (step, params) -> `EvalRecord` with the mean loss of each split.

    The losses are in nats per token, weighted by the loss weights of the targets; NaN if all
    weights are 0. If the data has several corpora, the record also has the losses for each corpus.
    Every call evaluates the same train.eval_iters batches of each split, and calls
    `heartbeat(activity)` before each batch. All processes call the function together. It raises
    `UsageError` if the data cannot be read.
    """
    loaders = {
        split: Loader.for_evaluation(dataset, split, config, steps.batch_sharding)
        for split in SPLITS
    }
    numbers = range(1, config.train.eval_iters + 1)
    sum_weights = jax.jit(
        lambda rows: rows.weights[:, 1:].sum(axis=1, dtype=jnp.float32),
        out_shardings=steps.replicated,
    )

    def losses_and_weights(params: Params, batch: jax.Array | TokenRows) -> tuple[Any, Any]:
        losses = steps.eval_step(params, batch)
        has_mask = isinstance(batch, TokenRows)
        return losses, sum_weights(batch) if has_mask else np.ones(losses.shape)

    def evaluate(step: int, params: Params) -> EvalRecord:
        mean_losses: dict[str, float] = {}
        by_corpus: dict[str, Any] = {}
        for split, loader in loaders.items():
            found, in_flight = [], DispatchLimiter()
            for batch in loader.batches(numbers):
                heartbeat(f"the evaluation after step {step}")
                found.append(losses_and_weights(params, batch))
                in_flight.add(found[-1][0])
            losses, weights = np.array(jax.device_get(found), np.float64).swapaxes(0, 1)
            mean = np.average(losses, weights=weights) if weights.any() else np.nan
            mean_losses[f"{split}_loss"] = float(mean)
            if len(loader.names) > 1:
                rows = list(zip(map(loader.corpora, numbers), losses, weights, strict=True))
                for name, mean in corpus_means(loader.names, rows).items():
                    by_corpus.setdefault(name, {})[f"{split}_loss"] = mean
        return EvalRecord(step=step, corpora=by_corpus or None, **mean_losses)

    return evaluate


def make_sampler(
    dataset: Dataset, config: Config, steps: CompiledFunctions
) -> Callable[[int, Params], SampleRecord | None]:
    """Return a function (step, params) -> `SampleRecord` with train.sample_tokens generated tokens.

    Every call uses the same prompt and the same seed. The function returns None if the data has no
    tokenizer or train.sample_tokens is 0. All processes call it together. Raises `UsageError` if
    the vocabulary lacks a character of train.sample_prompt.
    """
    tokenizer, train = dataset.tokenizer, config.train
    if tokenizer is None or train.sample_tokens == 0:
        return lambda step, params: None
    window, length = prompt_window(tokenizer, train.sample_prompt, config.model.block_size)
    n, vocab_size = train.sample_tokens, tokenizer.vocab_size
    generate = jax.jit(
        make_generate(
            steps.make_decoder,
            config.model.n_positions,
            vocab_size,
            n,
            SAMPLE_TEMPERATURE,
            SAMPLE_TOP_K,
        ),
        out_shardings=steps.replicated,
    )

    def sample(step: int, params: Params) -> SampleRecord:
        tokens = np.asarray(generate(params, window, np.int32(length), np.int32(train.seed)))
        text = continue_prompt(tokenizer, train.sample_prompt, tokens.tolist())
        return SampleRecord(step=step, text=text)

    return sample


def make_generate(
    make_decoder: Callable[[Params], tuple[DecodeFn, Any]],
    n_positions: int | None,
    vocab_size: int,
    n_tokens: int,
    temperature: float,
    top_k: int | None,
) -> Callable[[Params, jax.Array, jax.Array, jax.Array], jax.Array]:
    """Return a function that generates `n_tokens` tokens; the caller should jit it once.

    The function maps (params, window, length, seed) to token IDs, int32 (n_tokens,). `window` is
    int32 and holds at most model.block_size tokens: the prompt of `length` tokens, then padding.

    The prompt is written to the KV cache in chunks. After that, tokens are decoded one at a time.
    The text may grow beyond model.block_size. With rotary positions, each layer then attends to the
    cached keys and values of the last model.block_size tokens. With learned positions, each new
    token shifts the positions of all others, which invalidates the cache. As in nanoGPT, the last
    model.block_size tokens are then recomputed for every new token.

    Args:
        make_decoder: params -> (decode function, empty KV cache); see `CompiledFunctions`.
        n_positions: `ModelConfig.n_positions`: block_size with learned positions, None with RoPE.
        n_tokens: number of tokens to generate.
        vocab_size: vocabulary size of the tokenizer; the model's may be larger.
        temperature: divisor of the logits; 0 always picks the most likely token.
        top_k: sample from the `top_k` most likely tokens; None samples from all.
    """

    def generate(params: Params, window: jax.Array, length: jax.Array, seed: jax.Array):
        end = length + n_tokens
        T = n_positions or window.size + n_tokens  # the cache is valid for texts up to this size
        keys = jax.random.split(jax.random.key(seed), n_tokens)
        decode, empty_caches = make_decoder(params)

        def append_token(text: jax.Array, n: jax.Array, logits_1V: jax.Array) -> jax.Array:
            logits_V = logits_1V[0, :vocab_size]
            return text.at[n].set(draw_token(logits_V, keys[n - length], temperature, top_k))

        def decode_step(carry):
            text, n, caches = carry
            logits_1V, caches = decode(caches, tokens_1N(text, n - 1, 1), n - 1)
            return append_token(text, n, logits_1V), n + 1, caches

        def recompute_step(carry):
            text, n = carry
            logits_1V, _ = decode(empty_caches, tokens_1N(text, n - T, T), 0)
            return append_token(text, n, logits_1V), n + 1

        caches = prefill(decode, empty_caches, window, length)
        text = jnp.concatenate([window, jnp.zeros(n_tokens, jnp.int32)])
        text, n, _ = jax.lax.while_loop(
            lambda carry: carry[1] < jnp.minimum(end, T + 1), decode_step, (text, length, caches)
        )
        if text.size > T:
            text, _ = jax.lax.while_loop(lambda carry: carry[1] < end, recompute_step, (text, n))
        return jax.lax.dynamic_slice(text, (length,), (n_tokens,))

    return generate


def prefill(decode: DecodeFn, caches: Any, window: jax.Array, length: jax.Array) -> Any:
    """Return the KV caches of the first `length` tokens of `window`, computed in chunks.

    The last chunk may include padding. The cache entries of the padding are overwritten before any
    token attends to them.
    """
    P = min(PREFILL_CHUNK, window.size)

    def read_chunk(i: jax.Array, caches: Any) -> Any:
        first = jnp.minimum(i * P, window.size - P)  # the last chunk may overlap the one before
        return decode(caches, tokens_1N(window, first, P), first)[1]

    return jax.lax.fori_loop(0, -(-length // P), read_chunk, caches)


def tokens_1N(text: jax.Array, first: jax.Array, size: int) -> jax.Array:
    """Return `size` tokens of a text, starting at index `first`, as one row (1, size)."""
    return jax.lax.dynamic_slice(text, (first,), (size,))[None]


def draw_token(
    logits_V: jax.Array, key: jax.Array, temperature: float, top_k: int | None
) -> jax.Array:
    """Sample a token ID (an int32 scalar) from the logits; see `make_generate`."""
    if temperature == 0:
        return jnp.argmax(logits_V)
    if top_k is not None:
        least = jax.lax.top_k(logits_V, min(top_k, logits_V.size))[0][-1]
        logits_V = jnp.where(logits_V < least, -jnp.inf, logits_V)
    return jax.random.categorical(key, logits_V / temperature)


def prompt_window(tokenizer: Tokenizer, prompt: str, block_size: int) -> tuple[np.ndarray, int]:
    """Return the last `block_size` tokens of a prompt, padded, and their number before padding.

    The tokens are int32. They are padded to a multiple of `PREFILL_CHUNK`, but at most to
    `block_size`, so that prompts of similar lengths share a compiled function. An empty prompt
    becomes the end-of-text token, or token 0 if the tokenizer has no such token. Raises
    `UsageError` if the vocabulary lacks a character of the prompt.
    """
    tokens = tokenizer.encode(prompt)[-block_size:] if prompt else [tokenizer.end_of_text or 0]
    padded = -(-len(tokens) // PREFILL_CHUNK) * PREFILL_CHUNK
    window = np.zeros(min(block_size, padded), np.int32)
    window[: len(tokens)] = tokens
    return window, len(tokens)
