"""Evaluation during training: losses on both splits, and sampled text."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.config import Config, Sampling
from jaxgpt.data.batch import TokenRows
from jaxgpt.data.dataset import Dataset
from jaxgpt.data.loader import Loader
from jaxgpt.data.source import SPLITS
from jaxgpt.data.tokenizers import continue_prompt
from jaxgpt.parallel.sharding import Params
from jaxgpt.runtime.dispatch import DispatchLimiter
from jaxgpt.tracking.records import EvalRecord, SampleRecord
from jaxgpt.train.generate import make_generate, prompt_window
from jaxgpt.train.jitted import JittedFunctions
from jaxgpt.train.reporting.corpora import corpus_means

SAMPLING = Sampling(temperature=0.8, top_k=200)  # as in nanoGPT


def make_evaluator(
    dataset: Dataset, config: Config, steps: JittedFunctions, heartbeat: Callable[[str], None]
) -> Callable[[int, Params], EvalRecord]:
    """Return a function (step, params) -> `EvalRecord` that computes the mean loss of each split.

    The losses are in nats per token, weighted by the loss weights. A loss is NaN if all weights are
    0. If the data has several corpora, the record also has each corpus's losses (None if none of
    its targets were evaluated). Every call evaluates the same train.eval_iters microbatches of each
    split, and calls `heartbeat(activity)` after it starts each microbatch. All processes must call
    the function.
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
                found.append(losses_and_weights(params, batch))  # may compile
                heartbeat(f"the evaluation after step {step}")
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
    dataset: Dataset, config: Config, steps: JittedFunctions
) -> Callable[[int, Params], SampleRecord | None]:
    """Return a function (step, params) -> `SampleRecord` that generates text with the model.

    The text is train.sample_prompt followed by train.sample_tokens tokens. Every call uses the same
    seed. The function returns None if the data has no tokenizer or train.sample_tokens is 0. All
    processes must call the function.
    """
    tokenizer, train = dataset.tokenizer, config.train
    if tokenizer is None or train.sample_tokens == 0:
        return lambda step, params: None
    window, length = prompt_window(tokenizer, train.sample_prompt, config.model.block_size)
    n, vocab_size = train.sample_tokens, tokenizer.vocab_size
    generate = jax.jit(
        make_generate(steps.make_decoder, config.model.n_positions, vocab_size, n, SAMPLING),
        out_shardings=steps.replicated,
    )

    def sample(step: int, params: Params) -> SampleRecord:
        tokens = np.asarray(generate(params, window, np.int32(length), np.int32(train.seed)))
        text = continue_prompt(tokenizer, train.sample_prompt, tokens.tolist())
        return SampleRecord(step=step, text=text)

    return sample
