"""The model `jaxgpt` for EleutherAI's lm_eval. Importing this file registers the model."""

import collections
from collections.abc import Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from jaxgpt.cluster.process_group import join_alone
from jaxgpt.config import Sampling, UsageError
from jaxgpt.evaluate.encoder import encoder_of
from jaxgpt.evaluate.log_likelihoods import Pair, log_likelihoods
from jaxgpt.evaluate.model import Model
from jaxgpt.evaluate.trained import find_trained, run_folder

DEFAULT_BATCH = 16
GENERATED_AT_ONCE = 32  # number of tokens to generate before checking whether the text has ended
SUPPORTED = {"until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p", "min_p"}
NEUTRAL = {"num_beams": (None, 1)}  # accepted only with values that have no effect


def _number(name: str, given: Any, least: int = 1) -> int:
    if not str(given).isdecimal() or int(given) < least:
        raise UsageError(f"--model_args {name}={given}: must be a whole number, at least {least}")
    return int(given)


@register_model("jaxgpt")
class JaxGPT(TemplateLM):
    """A jaxgpt run as an lm_eval model: `--model jaxgpt --model_args run=DIR,mesh=[1,1,2]`."""

    def __init__(
        self,
        run: Any = None,
        step: int | None = None,
        mesh: str | Sequence[int] = "1,-1,1",
        dtype: str | None = None,
        max_length: int | None = None,
        batch_size: int | str = DEFAULT_BATCH,
        max_batch_size: int | None = None,
        device: str | None = None,
        **others: Any,
    ):
        """Start JAX and load a model.

        Args:
            run: path that `run_folder` accepts.
            step: checkpoint to load; default the newest.
            mesh: mesh to run the model on, in the format of parallel.mesh or as a list of sizes.
            dtype: compute dtype, float32 or bfloat16; default the run's.
            max_length: length of the longest row in tokens, at most the model's context length,
                which is the default.
            batch_size: number of rows to score at once, as in `Model`; `auto` means 16.
            max_batch_size, device: unused; lm_eval passes them to every model.
            others: unknown arguments, which cause an error.

        Raises `UsageError` if an argument is invalid.
        """
        super().__init__()
        del max_batch_size, device
        if others or run is None:
            wrong = f"{next(iter(others))} is unknown" if others else "run=DIR is missing"
            raise UsageError(
                f"--model_args: {wrong}; give run=DIR and optionally step, mesh, dtype, max_length"
            )
        if dtype not in (None, "float32", "bfloat16"):
            raise UsageError(f"--model_args dtype={dtype}: must be float32 or bfloat16")
        step = None if step is None else _number("step", step, least=0)
        longest = None if max_length is None else _number("max_length", max_length)
        is_auto = str(batch_size).startswith("auto")
        size = DEFAULT_BATCH if is_auto else _number("batch_size", batch_size)
        mesh = mesh if isinstance(mesh, str) else ",".join(map(str, mesh))
        cluster = join_alone("lm_eval")
        with run_folder(str(run), cluster) as folder:
            trained = find_trained(folder, step, mesh, dtype, (), longest)
            self._encoder = encoder_of(folder, trained.known_tokenizer(f"run={run}"))
            self._model = Model(trained, size, cluster)

    @property
    def eot_token_id(self) -> int:
        """ID of the end-of-text token, or 0 if there is none."""
        return self._encoder.tokenizer.end_of_text or 0

    @property
    def prefix_token_id(self) -> int:
        """ID of the token that replaces an empty context."""
        return self._encoder.prefix

    @property
    def max_length(self) -> int:
        """Length of the longest row in tokens; see `Model.block_size`."""
        return self._model.block_size

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Return the token IDs of a text, with special tokens unless `add_special_tokens=False`."""
        return self._encoder.encode(string, add_special_tokens is not False)

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        for text, _, continuation in requests:
            if len(continuation) > self.max_length:
                raise UsageError(
                    f"lm_eval: {str(text)[:80]!r} has {len(continuation)} tokens to predict, more "
                    f"than model.block_size={self.max_length}"
                )
        before = [self.prefix_token_id]  # replaces an empty context
        pairs = [Pair(context or before, continuation) for _, context, continuation in requests]
        answers = [tuple(found) for found in log_likelihoods(self._model, pairs)]
        for (text, *_), answer in zip(requests, answers, strict=True):
            if text is not None:
                self.cache_hook.add_partial("loglikelihood", text, answer)
        return answers

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-likelihood of each text in nats. Each token is predicted once.

        Special tokens that `tok_encode` adds are predicted too. The first token is predicted from
        `prefix_token_id`. Each window predicts at most `max_length` tokens.
        """
        windows = [self._windows(request.args[0]) for request in requests]
        flat = [(None, *pair) for pairs in windows for pair in pairs]
        scored = iter(self._loglikelihood_tokens(flat) if flat else [])
        out = []
        for request, pairs in zip(requests, windows, strict=True):
            out.append(sum(next(scored)[0] for _ in pairs))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, out[-1])
        return out

    def _windows(self, text: str) -> list[Pair]:
        found = get_rolling_token_windows(
            token_list=self.tok_encode(text),
            prefix_token=self.prefix_token_id,
            max_seq_len=self.max_length,
            context_len=1,
        )
        return [Pair(*make_disjoint_window(window)) for window in found]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the continuation of each context, up to a stop sequence or the end-of-text token.

        A continuation has at most max_gen_toks tokens (by default 256). A context that leaves no
        room for max_gen_toks tokens is truncated on the left. If a sampling option is 0, its
        default is used. The random seed of a request is the number of earlier `requests` with the
        same context.

        Raises `UsageError` if a generation option is not supported or out of range, or if
        max_gen_toks leaves no room for a context. Raises `ValueError` if temperature or
        max_gen_toks is not a number.
        """
        out, seeds = [], collections.Counter[str]()
        for request in requests:
            context, options = request.args
            out.append(self._generate(context, dict(options), seeds[context]))
            seeds[context] += 1
            self.cache_hook.add_partial("generate_until", (context, options), out[-1])
        return out

    def _generate(self, context: str, options: dict[str, Any], seed: int) -> str:
        options = normalize_gen_kwargs({k: v for k, v in options.items() if v is not None})
        for name, value in options.items():
            if name not in SUPPORTED and value not in NEUTRAL.get(name, ()):
                raise UsageError(
                    f"gen_kwargs: {name}={value} is not supported; use do_sample, temperature, "
                    "top_k, top_p or min_p"
                )
        length = options["max_gen_toks"]
        if length >= self.max_length:
            raise UsageError(
                f"gen_kwargs: max_gen_toks={length} leaves no room for a prompt in "
                f"{self.max_length} tokens; use a smaller max_gen_toks"
            )
        names = ("temperature", "top_k", "top_p", "min_p")
        sampling = Sampling(**{name: options[name] for name in names if options.get(name)})
        tokenizer = self._encoder.tokenizer
        end = tokenizer.end_of_text
        prompt = self.tok_encode(context)[-(self.max_length - length) :]
        prompt = prompt or [self.prefix_token_id]
        found, text = [], ""
        blocks = self._model.stream_tokens([prompt], length, sampling, [seed], GENERATED_AT_ONCE)
        for block_BN in blocks:
            found += block_BN[0].tolist()
            tokens = found[: found.index(end)] if end in found else found
            text = tokenizer.decode(tokens)
            if end in found or any(stop in text for stop in options["until"] if stop):
                break
        return postprocess_generated_text(text, options["until"], None)
