"""What a run looks at between its steps: losses on both splits, and text that the model writes."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxgpt.config import Config
from jaxgpt.data.dataset import Dataset
from jaxgpt.data.loader import Loader
from jaxgpt.data.source import SPLITS
from jaxgpt.data.tokenizers.char import continued
from jaxgpt.parallel.sharding import Params
from jaxgpt.runtime.dispatch import DispatchLimiter
from jaxgpt.tracking.records import EvalRecord, SampleRecord
from jaxgpt.train.generate import make_generate, prompt_window
from jaxgpt.train.metrics import CorpusLosses
from jaxgpt.train.state import StepFunctions

SAMPLE_TEMPERATURE = 0.8
SAMPLE_TOP_K = 200  # nanoGPT's


class Evaluator:
    """Mean loss over the same train.eval_iters batches of each split, every time."""

    def __init__(
        self,
        dataset: Dataset,
        config: Config,
        steps: StepFunctions,
        heartbeat: Callable[[str], None],
    ):
        """Create an evaluator that calls `heartbeat(activity)` before each batch."""
        self._iters = config.train.eval_iters
        self._heartbeat = heartbeat
        self._eval_step = steps.eval_step
        self._loaders = {
            split: Loader.for_evaluation(dataset, split, config, steps.batch_shape.sharding)
            for split in SPLITS
        }

    def __call__(self, step: int, params: Params) -> EvalRecord:
        """Return the evaluation record of a step."""
        mean_losses: dict[str, float] = {}
        by_corpus: dict[str, Any] = {}
        for split, loader in self._loaders.items():
            batches = loader.batches(range(1, self._iters + 1))
            found, in_flight = [], DispatchLimiter()
            for batch in batches:
                self._heartbeat(f"the evaluation after step {step}")
                found.append(self._eval_step(params, batch))
                in_flight.add(found[-1])
            losses = np.array([np.float64(row_losses) for row_losses in found])
            mean_losses[f"{split}_loss"] = float(losses.mean())
            if len(loader.names) > 1:
                of_each = CorpusLosses(len(loader.names))
                for number, row_losses in enumerate(losses, start=1):
                    of_each.add(loader.corpora(number), row_losses)
                for name, mean in zip(loader.names, of_each.means(), strict=True):
                    by_corpus.setdefault(name, {})[f"{split}_loss"] = mean
        return EvalRecord(step=step, corpora=by_corpus or None, **mean_losses)


class Sampler:
    """A few lines in the model's own words."""

    def __init__(self, dataset: Dataset, config: Config, steps: StepFunctions):
        self._tokenizer = dataset.tokenizer
        self._seed = config.train.seed
        if self._tokenizer is None or config.train.sample_tokens == 0:
            self._generate = None
            return
        self._prompt = config.train.sample_prompt
        self._window = prompt_window(self._tokenizer, self._prompt, config.model.block_size)
        vocab_size, n_tokens = self._tokenizer.vocab_size, config.train.sample_tokens
        generate = make_generate(
            steps.make_decoder, vocab_size, n_tokens, SAMPLE_TEMPERATURE, SAMPLE_TOP_K
        )
        self._generate = jax.jit(generate, out_shardings=steps.replicated)

    def __call__(self, step: int, params: Params) -> SampleRecord | None:
        """Return the sample of a step; None without a tokenizer or with train.sample_tokens=0."""
        if self._generate is None:
            return None
        window, length = self._window
        tokens = self._generate(params, window, np.int32(length), np.int32(self._seed))
        text = continued(self._tokenizer, self._prompt, np.asarray(tokens).tolist())
        return SampleRecord(step=step, text=text)
