"""Time to generate the first token and the whole text with the KV cache."""

import statistics
from collections.abc import Sequence

import jax
import numpy as np

from jaxgpt.bench.harness import PROG, Result, Value, open_job
from jaxgpt.config import Sampling, UsageError, parse_args
from jaxgpt.train.generate import make_generate
from jaxgpt.train.init_from import initial_model
from jaxgpt.train.jitted import make_steps

PROMPT = 16  # random tokens
TOKENS = 200
ROUNDS = 3


def run(settings: Sequence[str], tokens: int | None = None) -> Result:
    """Time the generation of one token and of `tokens` tokens, with untrained weights.

    `settings` are command-line settings. The prompt has 16 tokens. If `tokens` is None, 200 tokens
    are generated, or fewer if model.block_size is too small. Each time is the median of three
    rounds. Raises `UsageError` if a setting is invalid, if the text does not fit into
    model.block_size, or if there are several processes or devices.
    """
    config = parse_args(settings, PROG, initial_model)
    room = config.model.block_size - PROMPT
    n_tokens = tokens or max(1, min(TOKENS, room))
    if n_tokens > room:
        raise UsageError(
            f"--tokens={n_tokens}: with a prompt of {PROMPT} tokens, the text does not fit into "
            f"model.block_size={config.model.block_size}; set that to at least "
            f"{PROMPT + n_tokens}, or give fewer tokens"
        )
    with open_job(config, single_process=True) as job:
        config, mesh = job.start_jax(config)
        if mesh.size > 1:
            raise UsageError(
                f"parallel.mesh={config.parallel.mesh}: has {mesh.size} devices, but bench sample "
                "runs on one; give --mesh 1,1,1"
            )
        steps = make_steps(config, mesh)
        params = steps.init().params
        random, size = np.random.default_rng(config.train.seed), config.model.block_size
        window = random.integers(config.model.vocab_size, size=size, dtype=np.int32)

        def seconds_for(n: int) -> float:
            model = config.model
            generate = jax.jit(
                make_generate(
                    steps.make_decoder, model.n_positions, model.vocab_size, n, Sampling()
                )
            )

            def write() -> None:
                jax.block_until_ready(generate(params, window, np.int32(PROMPT), np.int32(0)))

            write()  # compiles
            return statistics.median(job.timed(write)[1] for _ in range(ROUNDS))

        first, whole = seconds_for(1), seconds_for(n_tokens)
        return {
            "config": config.config,
            "dtype": config.train.dtype,
            "device_kind": mesh.devices.flat[0].device_kind,
            "prompt_tokens": PROMPT,
            "tokens": n_tokens,
            "first_token_seconds": Value(first, "s", "including the prompt"),
            "seconds": Value(whole, "s", "for the whole text"),
            "seconds_per_token": Value(whole / n_tokens, "s"),
        }
