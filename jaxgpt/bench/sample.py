"""Time to write a text with the KV cache, beside reading its whole prefix for each token.

Both take the likeliest token every time, and so have to write the same.
"""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxgpt.bench.harness import PROG, Result, Value, open_job
from jaxgpt.config import Config, UsageError, parse_args
from jaxgpt.models.attention import make_attention
from jaxgpt.models.transformer import gpt_graph, logits
from jaxgpt.train.evaluate import make_generate
from jaxgpt.train.functions import make_steps
from jaxgpt.train.run.resume import initial_model

PROMPT = 16  # random tokens
TOKENS = 200
TIMES = 10  # larger than initial weights: those of what tells positions apart
PIECE = 64  # prefixes are padded to a multiple of this, or each would be a program of its own


def run(settings: Sequence[str], tokens: int | None = None) -> Result:
    """Write a text with initial weights: with the cache, without it, and with it again.

    Raises `UsageError` if so many tokens do not fit, or for several processes or devices.
    """
    config = parse_args(settings, PROG, initial_model)
    room = config.model.block_size - PROMPT
    n_tokens = tokens or max(1, min(TOKENS, room))
    if n_tokens > room:
        raise UsageError(
            f"--tokens={n_tokens}: with a prompt of {PROMPT} they must fit into "
            f"model.block_size={config.model.block_size}; give at least {PROMPT + n_tokens} there"
        )
    with open_job(config, alone=True) as job:
        config, mesh = job.start_jax(config)
        if mesh.size > 1:
            raise UsageError(
                f"parallel.mesh={config.parallel.mesh}: has {mesh.size} devices, and bench sample "
                "runs on one; give --mesh 1,1,1"
            )
        steps = make_steps(config, mesh)
        params = steps.init().params
        # Or a model that has not been trained would write the same token all the time.
        table = params.get("position_embedding") or params["layers"]["attention"]["out"]
        for name in table:
            table[name] *= TIMES
        random, size = np.random.default_rng(config.train.seed), config.model.block_size
        window = random.integers(config.model.vocab_size, size=size, dtype=np.int32)

        def cached_writer(n: int) -> Callable[[], np.ndarray]:
            model, decode = config.model, steps.make_decoder
            generate = jax.jit(
                make_generate(decode, model.n_positions, model.vocab_size, n, 0.0, None)
            )
            return lambda: np.asarray(generate(params, window, np.int32(PROMPT), np.int32(0)))

        write, write_first = cached_writer(n_tokens), cached_writer(1)
        recompute = recomputing_writer(config, params)
        # Nothing's first call is timed: it compiles, and its memory is new to the process.
        write()
        write_first()
        recompute(window, n_tokens)
        _, first = job.timed(write_first)
        cached, before = job.timed(write)
        job.log(f"with the cache {before:.1f} s; now reading the prefix for each token")
        recomputed, slow = job.timed(lambda: recompute(window, n_tokens))
        fast = statistics.mean([before, job.timed(write)[1]])
        return {
            "config": config.config,
            "dtype": config.train.dtype,
            "device_kind": mesh.devices.flat[0].device_kind,
            "prompt_tokens": PROMPT,
            "tokens": n_tokens,
            "first_token_seconds": Value(first, "s", "which reads the prompt"),
            "cached_seconds": Value(fast, "s", f"{1e3 * fast / n_tokens:.1f} ms a token"),
            "recomputed_seconds": Value(slow, "s", "reading the prefix for each token"),
            "ratio": Value(slow / fast, "x"),
            "same_tokens": Value(int((cached == recomputed).sum()), note="both take the likeliest"),
            "distinct_tokens": len(set(cached.tolist())),
        }


def recomputing_writer(config: Config, params: Any) -> Callable[[np.ndarray, int], np.ndarray]:
    """Return a function that calls the model on the whole text for each token that it adds."""
    graph = gpt_graph(
        config.model,
        dtype=jnp.dtype(config.train.dtype),
        attend=make_attention("xla", config.model),
        scan_layers=True,
        end_of_text=config.document_end,
    )

    @jax.jit
    def likeliest(params: Any, text_T: jax.Array, length: Any) -> jax.Array:
        x_1TD, w_VD, first = nnx.merge(graph, params).hidden_states(text_T[None])
        return jnp.argmax(logits(x_1TD[0, length - 1], w_VD, first, config.model))

    def write(window: np.ndarray, n_tokens: int) -> np.ndarray:
        text = window.copy()
        for n in range(PROMPT, PROMPT + n_tokens):
            padded = min(text.size, -(-n // PIECE) * PIECE)
            text[n] = likeliest(params, text[:padded], np.int32(n))
        return text[PROMPT : PROMPT + n_tokens]

    return write
