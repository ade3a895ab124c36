"""EleutherAI's lm_eval with jaxgpt's models: importing this registers `jaxgpt` there.

lm_eval runs on process 0. The other processes of a job follow it: they take part in whatever it
asks of the model.
"""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

from lm_eval.__main__ import cli_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows

from jaxgpt.cluster.process_group import ProcessGroup, join_process_group
from jaxgpt.config import UsageError
from jaxgpt.evaluate.encoder import Encoder, encoder_of
from jaxgpt.evaluate.model import (
    LogLikelihood,
    Model,
    Pair,
    find_trained,
    log_likelihoods,
    run_folder,
)

LENGTH_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
DEFAULT_BATCH = 16
DEFAULT_LENGTH = 256  # tokens to generate: that of lm_eval's Hugging Face models
GENERATED_AT_ONCE = 32  # tokens, after which a text that has come to its end is not continued


class Team:
    """The processes of a job, which call the same functions of a model, as process 0 says."""

    def __init__(self, cluster: ProcessGroup):
        self.cluster = cluster
        self.model: Model | None = None
        self.encoder: Encoder | None = None

    def open(
        self,
        run: str,
        step: int | None,
        mesh: str,
        dtype: str | None,
        batch: int,
        longest: int | None,
    ) -> None:
        """Load a model on all processes; `UsageError` on all if it cannot be."""
        with run_folder(run, self.cluster) as folder:
            trained = self.cluster.run_on_all(find_trained, folder, step, mesh, dtype, (), longest)
            if trained.tokenizer is None:
                came = "the weights came without a tokenizer.json"
                came = (
                    "its data had no meta.json with a tokenizer" if trained.data == "own" else came
                )
                raise UsageError(f"run={run}: {came}, which tasks need")
            self.encoder = self.cluster.run_on_all(encoder_of, folder, trained.tokenizer)
            self.model = Model(trained, batch, self.cluster)

    def log_likelihoods(self, pairs: Sequence[Sequence[list[int]]]) -> list[LogLikelihood]:
        """Return those of pairs of token ids."""
        return log_likelihoods(self.model, [Pair(*pair) for pair in pairs])

    def generate(self, *arguments: Any) -> list[int]:
        """Return the tokens of `Model.generate`."""
        return self.model.generate(*arguments)

    def call(self, name: str, *arguments: Any) -> Any:
        """Call one of these functions on all processes, from process 0; return its result."""
        self.cluster.broadcast([name, arguments])
        return getattr(self, name)(*arguments)

    def follow(self) -> None:
        """Do what process 0 calls, until it ends; raise the `UsageError` that it ends with."""
        while (call := self.cluster.broadcast(None))[0] != "end":
            with contextlib.suppress(UsageError):  # process 0 raises the same one and reports it
                getattr(self, call[0])(*call[1])
        if call[1] is not None:
            raise UsageError(call[1])

    @contextlib.contextmanager
    def lead(self) -> Iterator[None]:
        """Tell the others at the end that there is nothing more to do."""
        try:
            yield
        except UsageError as error:
            self.cluster.broadcast(["end", str(error)])
            raise
        except SystemExit:  # --help, or an option that lm_eval does not know
            self.cluster.broadcast(["end", None])
            raise
        self.cluster.broadcast(["end", None])


TEAM: ContextVar[Team | None] = ContextVar("team", default=None)  # within `run_command`


def run_command(argv: list[str]) -> None:
    """Run lm_eval's command line on process 0, which the others follow."""
    with join_process_group() as cluster:
        team = Team(cluster)
        if not cluster.is_main:
            team.follow()
            return
        before, sys.argv = sys.argv, ["lm-eval", *argv]  # lm_eval reads no other
        reset = TEAM.set(team)
        try:
            with team.lead():
                cli_evaluate()
        finally:
            sys.argv = before
            TEAM.reset(reset)


@register_model("jaxgpt")
class JaxGPT(TemplateLM):
    """A run of jaxgpt as lm_eval's model: `--model jaxgpt --model_args run=DIR,mesh=[1,1,2]`."""

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
        """Load a model.

        Args:
            run: the run directory.
            step: of the checkpoint; default the newest.
            mesh: sizes of data, fsdp and tensor.
            dtype: of the computation, float32 or bfloat16; default the run's.
            max_length: of a context, in tokens; default the model's.
            batch_size: rows that are scored at once; `auto` is 16.
            max_batch_size, device: as lm_eval gives them to every model; devices are JAX's.
            others: refused.
        """
        super().__init__()
        del max_batch_size, device
        if others or run is None:
            wrong = f"{next(iter(others))} is not known" if others else "there is no run=DIR"
            raise UsageError(
                f"--model_args: {wrong}; give run=DIR, and step, mesh, dtype, max_length if needed"
            )
        if dtype not in (None, "float32", "bfloat16"):
            raise UsageError(f"--model_args dtype={dtype}: must be float32 or bfloat16")
        if step is not None and not str(step).isdecimal():
            raise UsageError(f"--model_args step={step}: must be a whole number")
        longest = None if max_length is None else str(max_length)
        if longest is not None and not (longest.isdecimal() and int(longest) > 0):
            raise UsageError(f"--model_args max_length={longest}: must be a number of at least 1")
        size = DEFAULT_BATCH if str(batch_size).startswith("auto") else batch_size
        if not str(size).isdecimal() or int(size) < 1:
            raise UsageError(f"--batch_size={batch_size}: must be a number of at least 1, or auto")
        mesh = mesh if isinstance(mesh, str) else ",".join(map(str, mesh))
        self._team = TEAM.get() or Team(join_process_group())
        if TEAM.get() is None and self._team.cluster.size > 1:
            raise UsageError(
                "lm_eval: a job of several processes runs python -m jaxgpt.evaluate lm-eval ..."
            )
        step = None if step is None else int(step)
        longest = longest and int(longest)
        self._team.call("open", str(run), step, mesh, dtype, int(size), longest)

    @property
    def _encoder(self) -> Encoder:
        return self._team.encoder

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text; 0 if there is none."""
        return self._encoder.tokenizer.end_of_text or 0

    @property
    def prefix_token_id(self) -> int:
        """The token that stands before a text without a context."""
        return self._encoder.prefix

    @property
    def max_length(self) -> int:
        """The longest context."""
        return self._team.model.block_size

    @property
    def batch_size(self) -> int:
        """Number of rows that are scored at once."""
        return self._team.model.batch_size

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Return the tokens of a text, with those that its tokenizer adds unless told not to."""
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
        before = [self.prefix_token_id]  # of a text that follows nothing but spaces
        pairs = [(context or before, continuation) for _, context, continuation in requests]
        answers = [tuple(answer) for answer in self._team.call("log_likelihoods", pairs)]
        for (text, *_), answer in zip(requests, answers, strict=True):
            if text is not None:
                self.cache_hook.add_partial("loglikelihood", text, answer)
        return answers

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-likelihood of each whole text, each token predicted once."""
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
        # The tokens before the first that is predicted: all others stand in both lists.
        return [Pair(inputs[: len(inputs) - len(new) + 1], new) for inputs, new in found]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return a text that follows each context, up to the first of its stop sequences."""
        out = []
        for request in requests:
            context, options = request.args
            out.append(self._generate(context, dict(options)))
            self.cache_hook.add_partial("generate_until", (context, options), out[-1])
        return out

    def _generate(self, context: str, options: dict[str, Any]) -> str:
        length = next((int(options[n]) for n in LENGTH_NAMES if n in options), DEFAULT_LENGTH)
        temperature, top_k = generation_options(options)
        until = options.get("until") or []
        until = [until] if isinstance(until, str) else list(until)
        tokenizer = self._encoder.tokenizer
        end = tokenizer.end_of_text
        prompt = self.tok_encode(context)[-max(1, self.max_length - length) :]
        prompt = prompt or [self.prefix_token_id]
        found, text = [], ""
        while len(found) < length:
            at_once = min(length, GENERATED_AT_ONCE)
            found += self._team.call(
                "generate", prompt + found, at_once, temperature, top_k, len(found)
            )
            text = tokenizer.decode(_until_token(found[:length], end))
            if end in found or any(stop in text for stop in until if stop):
                break
        for stop in until:
            text = text.split(stop)[0] if stop else text
        return text


def generation_options(options: dict[str, Any]) -> tuple[float, int | None]:
    """Return the temperature and top_k that a task asks for; greedy unless it asks for more.

    Raises `UsageError` for what jaxgpt cannot do.
    """
    neutral = {"top_p": (None, 1, 1.0), "num_beams": (None, 1), "min_p": (None, 0, 0.0)}
    known = {"until", "do_sample", "temperature", "top_k", *LENGTH_NAMES}
    for name, value in options.items():
        if name not in known and value not in neutral.get(name, ()):
            raise UsageError(
                f"gen_kwargs: {name}={value} is not known; there are do_sample, temperature, top_k"
            )
    temperature, top_k = float(options.get("temperature") or 0.0), options.get("top_k")
    is_greedy = options.get("do_sample") is False
    return (0.0 if is_greedy else temperature), (int(top_k) if top_k else None)


def _until_token(tokens: list[int], end: int | None) -> list[int]:
    return tokens[: tokens.index(end)] if end in tokens else tokens
