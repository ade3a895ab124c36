"""Time to write a text with its cache of keys and values, beside reading its prefix for each token.

Both take the likeliest token every time, and so have to write the same.
"""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxgpt.bench.alone import join_alone
from jaxgpt.bench.progress import tell
from jaxgpt.config import Config, UsageError, mesh_sizes
from jaxgpt.data.dataset import vocabulary_size
from jaxgpt.runtime.compile_cache import use_compile_cache
from jaxgpt.runtime.initialize import initialize_jax

PROMPT = 16  # random tokens
TOKENS = 200
POSITIONS_TIMES = 10
PIECE = 64  # prefixes are padded to a multiple of this, or each would be a program of its own


def measure(config: Config, n_tokens: int | None) -> dict[str, Any]:
    """Writes a text with initial weights: with the cache, without it, and with it again.

    Args:
        n_tokens: to write after the prompt; None takes 200, or as many as fit.

    Returns:
        Seconds of both ways, their ratio, and how many tokens are the same.

    Raises:
        UsageError: if so many tokens are more than fit, or for several processes.
    """
    room = config.model.block_size - PROMPT
    if room < 1:
        raise UsageError(
            f"model.block_size={config.model.block_size}: has no room after a prompt of {PROMPT}; "
            f"give at least {PROMPT + 1}"
        )
    n_tokens = n_tokens or min(TOKENS, room)
    if n_tokens > room:
        raise UsageError(
            f"--tokens={n_tokens}: with a prompt of {PROMPT} they must fit into "
            f"model.block_size={config.model.block_size}; give at most {room}"
        )
    cluster = join_alone("sample", config.init_timeout)
    vocab_size = vocabulary_size(config.data, config.model)
    config = config.replace(model__vocab_size=vocab_size)
    initialize_jax(cluster, mesh_sizes(config))
    use_compile_cache(config.compile_cache, cluster)
    import jax

    from jaxgpt.parallel.mesh import make_mesh
    from jaxgpt.train.generate import make_generate
    from jaxgpt.train.step import make_steps

    mesh = make_mesh(mesh_sizes(config, jax.device_count()), cluster.hosts)
    if mesh.size > 1:
        raise UsageError(
            f"parallel.mesh={config.parallel.mesh}: has {mesh.size} devices, and bench sample runs "
            "on one; give --mesh 1,1,1"
        )
    steps = make_steps(config, mesh)
    params = steps.init().params
    # Or a model that has not been trained would write the same token all the time.
    params["wpe"]["embedding"] *= POSITIONS_TIMES
    window = np.zeros(config.model.block_size, np.int32)
    window[:PROMPT] = np.random.default_rng(config.train.seed).integers(vocab_size, size=PROMPT)

    def with_cache(n: int) -> Callable[[], np.ndarray]:
        generate = jax.jit(make_generate(steps.make_decoder, vocab_size, n, 0.0, None))
        return lambda: np.asarray(generate(params, window, np.int32(PROMPT), np.int32(0)))

    tell(cluster, "compiling")
    write, write_first = with_cache(n_tokens), with_cache(1)
    recompute = recomputing(config, params)
    # Nothing's first call is timed: it compiles, and its memory is new to the process.
    for end in range(PIECE, PROMPT + n_tokens + PIECE, PIECE):
        recompute(window, min(end, PROMPT + n_tokens) - 1, 1)
    write(), write_first()
    _, first = timed(write_first)
    cached, before = timed(write)
    tell(cluster, f"with the cache {before:.1f} s; now reading the prefix for each token")
    recomputed, slow = timed(lambda: recompute(window, PROMPT, n_tokens))
    _, after = timed(write)
    fast = statistics.mean([before, after])
    return {
        "config": config.config,
        "n_parameters": steps.n_parameters[1],
        "dtype": config.train.dtype,
        "device_kind": steps.mesh.devices.flat[0].device_kind,
        "prompt_tokens": PROMPT,
        "tokens": n_tokens,
        "first_token_seconds": first,
        "cached_seconds": fast,
        "recomputed_seconds": slow,
        "ratio": slow / fast,
        "same_tokens": int((cached == recomputed).sum()),
        "distinct_tokens": len(set(cached.tolist())),
    }


def recomputing(config: Config, params: Any) -> Callable[[np.ndarray, int, int], np.ndarray]:
    """A function that reads all of a text for each token that it adds: the model's plain call.

    Returns:
        (text, its length, how many tokens to add) -> the tokens that are added.
    """
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from jaxgpt.models.attention import make_attention
    from jaxgpt.models.transformer import GPT, logits

    network = functools.partial(
        GPT,
        config.model,
        dtype=jnp.dtype(config.train.dtype),
        attend=make_attention("xla", dropout=0),
        scan_layers=True,
    )
    graph = nnx.graphdef(nnx.eval_shape(lambda: network(rngs=nnx.Rngs(0))))

    @jax.jit
    def likeliest(params: Any, text_T: jax.Array, length: Any) -> jax.Array:
        x_1TD, w_VD, first = nnx.merge(graph, params).hidden(text_T[None])
        return jnp.argmax(logits(x_1TD[0, length - 1], w_VD, first, config.model.vocab_size))

    def write(window: np.ndarray, length: int, n_tokens: int) -> np.ndarray:
        text = window.copy()
        for n in range(length, length + n_tokens):
            padded = min(text.size, -(-n // PIECE) * PIECE)
            text[n] = likeliest(params, text[:padded], np.int32(n))
        return text[length : length + n_tokens]

    return write


def timed(act: Callable[[], Any]) -> tuple[Any, float]:
    """What `act` returns, and its seconds."""
    began = time.perf_counter()
    return act(), time.perf_counter() - began


def describe(found: dict[str, Any]) -> str:
    """What `measure` found, in words."""
    n, fast, slow = found["tokens"], found["cached_seconds"], found["recomputed_seconds"]
    return "\n".join(
        [
            f"sample: {found['config']}, {found['n_parameters'] / 1e6:.2f}M parameters, "
            f"{found['dtype']}, one {found['device_kind']}; {n} tokens after "
            f"{found['prompt_tokens']}, always the likeliest",
            f"with the cache: {fast:.3g} s, {1e3 * fast / n:.1f} ms a token; "
            f"{1e3 * found['first_token_seconds']:.3g} ms to the first, which reads the prompt",
            f"prefix read for each token: {slow:.3g} s, {1e3 * slow / n:.1f} ms a token (padded to "
            f"a multiple of {PIECE})",
            f"ratio: {found['ratio']:.1f} x; {found['same_tokens']} of {n} tokens are the same, "
            f"{found['distinct_tokens']} of them distinct",
        ]
    )
