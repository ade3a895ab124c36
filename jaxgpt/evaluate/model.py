"""A trained model on a mesh: scores of rows, logits and generated text."""

import functools
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set, Sized
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import numpy as np
from tqdm import tqdm

from jaxgpt.cluster.process_group import ProcessGroup
from jaxgpt.config import Sampling, UsageError, mesh_shape, shorten
from jaxgpt.data.loader import global_array
from jaxgpt.data.tokenizers import Tokenizer, continue_prompt, prompt_tokens
from jaxgpt.evaluate.stop_strings import Written, text_so_far
from jaxgpt.evaluate.trained import Trained
from jaxgpt.runtime.initialize import initialize_jax

if TYPE_CHECKING:
    import jax

    from jaxgpt.parallel.sharding import Params

MAX_LOGITS = 2**27  # approximate maximum number of logits on each device in `score`: 0.5 GiB
LEAST_LENGTH = 64  # tokens; shorter rows are padded, because each length requires a compilation
IN_FLIGHT = 2  # batches in flight while the host reads results
TOKENS_AT_ONCE = 16  # tokens to generate between checks for stop strings


class Rows(NamedTuple):
    """Rows of tokens to score."""

    size: int  # number of rows
    length: int  # T, as returned by `Model.row_length`; a row has up to T+1 tokens
    read: Callable[[int], np.ndarray]  # row index -> the row's token IDs, at most T+1


class Model:
    """A model on a mesh.

    All processes must call its methods with the same arguments, and must take the same number of
    items from its iterators. Methods that use the parameters raise `UsageError`, as `params` does,
    and `RuntimeError` if JAX fails.
    """

    def __init__(
        self,
        trained: Trained,
        batch_size: int,
        cluster: ProcessGroup,
        params: "Params | None" = None,
        lock: "threading.RLock | None" = None,
    ):
        """Start JAX and load the parameters, unless `params` is given.

        Args:
            trained: the checkpoint.
            batch_size: number of rows to score at once. It is rounded up to a multiple of the
                number of batch shards.
            cluster: the processes of the job.
            params: the checkpoint's parameters, already on the mesh.
            lock: lock of the trainer that owns the parameters. The trainer holds the lock during
                each step, because a step deletes the old parameters.

        Raises `UsageError` if the mesh does not fit the devices or the model, or if the checkpoint
        is damaged or cannot be read. Also raises whatever `initialize_jax` and `restore_params`
        raise.
        """
        if params is None:
            initialize_jax(cluster, mesh_shape(trained.config))
        import jax

        from jaxgpt.checkpoint.checkpointer import restore_params
        from jaxgpt.parallel.mesh import make_mesh
        from jaxgpt.train.jitted import make_steps

        shape = mesh_shape(trained.config, jax.device_count())
        n_shards, vocab_size = shape.split_of("splits_batch"), trained.config.model.vocab_size
        assert vocab_size is not None  # every checkpoint contains the vocabulary size
        chunk = trained.config.train.loss_chunk or MAX_LOGITS
        self.batch_size = _round_up(batch_size, n_shards)
        self.config = trained.config.replace(
            train__batch_size=self.batch_size,
            train__loss_chunk=max(1, min(chunk, MAX_LOGITS // vocab_size)),
        )
        self.trained, self.mesh_shape, self._cluster = trained, shape, cluster
        self._vocab_size = vocab_size
        mesh = make_mesh(shape, cluster.hosts)
        self.steps = make_steps(self.config, mesh, hosts=cluster.hosts)
        if params is None:
            shapes = self.steps.state_shapes.params
            where = Path(trained.where)
            params = restore_params(where, trained.step, shapes, cluster)
        self._params, self._lock = params, lock or threading.RLock()
        self._is_of_trainer = lock is not None
        self._scorers: dict[tuple[int, bool], Callable[..., Any]] = {}
        self._generators: dict[tuple[int, int, Sampling], Any] = {}

    def __repr__(self) -> str:
        size = f"n_layer={self.config.model.n_layer} n_embd={self.config.model.n_embd}"
        return f"<jaxgpt model: {size}, {self.steps.describe()}, at step {self.trained.step}>"

    @property
    def params(self) -> "Params":
        """The parameters, or a copy of them if a trainer owns the model.

        Raises `UsageError` if a failed training step has deleted the parameters.
        """
        return self._call(copied if self._is_of_trainer else lambda params: params)

    def update(self, params: "Params", step: int) -> None:
        """Replace the parameters, and set the step that produced them.

        `params` must have the same structure, shapes, dtypes and shardings as the current
        parameters. This is not checked. If `lock` was given, the caller must hold it.
        """
        self._params, self.trained = params, replace(self.trained, step=step)

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return `function(params, *arguments)`. Raises `UsageError`, as `params` does."""
        with self._lock:
            check_exists(self._params, "failed; load or restore the model")
            return function(self._params, *arguments)

    @property
    def step(self) -> int:
        """The training step that produced the parameters; 0 if they are initial or imported."""
        return self.trained.step

    @property
    def block_size(self) -> int:
        """Length T of the longest row."""
        return self.trained.block_size

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises `UsageError` if there is no tokenizer."""
        return self.trained.known_tokenizer(self.trained.where, ", or use generate_tokens")

    def row_length(self, n: int) -> int:
        """Return the padded length for a row of n inputs.

        To limit the number of compilations, `n` is rounded up to a power of 2, at least
        `LEAST_LENGTH`. The length is then rounded up so that it can be divided evenly over the mesh
        axes that split the sequence or the heads. The result is at most `block_size`.
        """
        length = max(LEAST_LENGTH, 2 ** (n - 1).bit_length()) if n else LEAST_LENGTH
        shape = self.mesh_shape
        n_parts = shape.split_of("splits_sequence", "splits_heads")
        if shape.split_of("splits_sequence") > 1:  # a device may hold two chunks of a row
            n_parts *= 2
        return min(self.block_size, _round_up(length, n_parts))

    def score(
        self, rows: "Rows | Iterable[Sequence[int] | np.ndarray]", with_likeliest: bool = False
    ) -> Iterator[tuple[np.ndarray, ...]]:
        """Iterate over the scores of each row: (losses,) or, if `with_likeliest`, (losses, tokens).

        Losses are float32 in nats, and tokens are the most likely int32 IDs. Element i refers to
        token i + 1 of the row. Both arrays have the shape (T,), where T is `rows.length`; losses
        after the end of a row are 0. The tokens of a `Rows` are not checked. `rows` may also be a
        list of token ID sequences, each of at most `block_size` + 1 tokens. In this case, a
        sequence of n tokens yields arrays of shape (n - 1,), and invalid tokens raise `UsageError`
        as in `logits`. Also raises whatever `rows.read` raises. On a terminal, process 0 shows a
        progress bar.

        With GPT-2's vocabulary on a CPU, `with_likeliest` increases the time by 28% (JAX 0.10.2,
        2026-11).
        """
        if not isinstance(rows, Rows):
            if not isinstance(rows, Iterable):
                raise UsageError(f"rows={rows!r}: must be a list of sequences of token IDs")
            texts = [self._check_tokens(row, "(T,)", self.block_size + 1) for row in rows]
            longest = max((text.size for text in texts), default=1)
            rows = Rows(len(texts), self.row_length(longest - 1), texts.__getitem__)
            return (
                tuple(values[: text.size - 1] for values in scores)
                for text, scores in zip(texts, self._scores(rows, with_likeliest), strict=True)
            )
        return self._scores(rows, with_likeliest)

    def _scores(self, rows: Rows, with_likeliest: bool) -> Iterator[tuple[np.ndarray, ...]]:
        """Yield the scores of each row; see `score`."""
        in_flight: deque[tuple[int, Any]] = deque()
        show = None if self._cluster.is_main else True  # None shows the bar only on a terminal
        score = self._compile_scorer(rows.length, with_likeliest)
        with tqdm(total=rows.size, unit=" rows", leave=False, disable=show) as progress:
            for first in itertools.count(0, self.batch_size):
                if first < rows.size:
                    scores = self._call(score, self._batch(rows, first))
                    in_flight.append((min(self.batch_size, rows.size - first), scores))
                    if len(in_flight) <= IN_FLIGHT:
                        continue
                if not in_flight:
                    return
                size, scores = in_flight.popleft()
                yield from zip(*(np.asarray(of_batch)[:size] for of_batch in scores), strict=True)
                progress.update(size)

    def logits(self, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the next-token logits at each token: float32 (T, V), or (B, T, V) for a batch.

        `score` computes its losses from the same logits, up to rounding.

        Args:
            tokens: token IDs of one sequence (T,) or of a batch (B, T). T is at most `block_size`.

        Raises `UsageError` if a token is not in the vocabulary, if there are too many tokens or
        none, or if `tokens` has the wrong shape or dtype.
        """
        given = self._check_tokens(tokens)
        texts = given.reshape(-1, given.shape[-1])
        rows, found = Rows(len(texts), self.row_length(texts.shape[1]), texts.__getitem__), []
        for first in range(0, rows.size, self.batch_size):
            logits_BTV = self._call(self.steps.eval_logits, self._batch(rows, first))
            found.append(np.asarray(logits_BTV)[: rows.size - first, : texts.shape[1]])
        return np.concatenate(found).reshape(*given.shape, -1)

    def _check_tokens(
        self,
        tokens: Sequence[int] | np.ndarray,
        shapes: str = "(T,) or (B, T)",
        longest: int | None = None,
        truncate: bool = False,
    ) -> np.ndarray:
        """Return token IDs as an integer array. `shapes` lists the accepted shapes.

        `longest` is the maximum length T, by default `block_size`.

        If `truncate` is True, return only the last `block_size` tokens. Raises `UsageError` if the
        tokens are invalid.
        """
        try:
            given, vocab_size = np.asarray(tokens), self._vocab_size
        except ValueError:
            raise UsageError("tokens: all sequences in a batch must have the same length") from None
        n_axes = (1, 2) if "B" in shapes else (1,)
        if given.ndim not in n_axes or not given.size or given.dtype.kind not in "iu":
            raise UsageError(
                f"tokens: an array of shape {given.shape} and dtype {given.dtype} does not "
                f"contain token IDs; give IDs of shape {shapes}, such as "
                "model.tokenizer.encode(text)"
            )
        if truncate:
            given = given[..., -self.block_size :]
        if given.shape[-1] > (longest or self.block_size):
            raise UsageError(
                f"tokens: a sequence of {given.shape[-1]} tokens is too long for "
                f"model.block_size={self.block_size}; give at most {longest or self.block_size} "
                "tokens"
            )
        outside = given[(given < 0) | (given >= vocab_size)]
        if outside.size:
            raise UsageError(
                f"tokens: {outside[0]} is not in the vocabulary of {vocab_size} tokens; use the "
                "model's own tokenizer"
            )
        return given

    def _compile_scorer(self, length: int, with_likeliest: bool) -> Callable[..., Any]:
        """Return a compiled function that scores rows of one length with `eval_tokens`.

        The first call for a length waits until all processes have compiled the function.
        """
        import jax

        key = length, with_likeliest
        if key not in self._scorers:
            where = self.steps.batch_sharding
            batch = jax.ShapeDtypeStruct((self.batch_size, length + 1), np.int32, sharding=where)

            def score(params: "Params", batch: jax.Array) -> tuple[jax.Array, ...]:
                losses_BT, likeliest_BT = self.steps.eval_tokens(params, batch)
                return (losses_BT, likeliest_BT) if with_likeliest else (losses_BT,)

            compiled = jax.jit(score, out_shardings=self.steps.replicated)
            self._scorers[key] = self._call(compiled.lower, batch).compile()
            self._cluster.barrier()
        return self._scorers[key]

    def _batch(self, rows: Rows, first: int) -> "jax.Array":
        """Return a batch of rows, starting with row `first`: int32 (batch_size, T+1).

        Missing tokens are `NO_TOKEN`. Each process reads only the rows that its devices need.
        """
        from jaxgpt.data.batch import NO_TOKEN

        def read(wanted: range) -> np.ndarray:
            out = np.full((len(wanted), rows.length + 1), NO_TOKEN, np.int32)
            for place, row in zip(out, wanted, strict=True):
                if first + row < rows.size:
                    tokens = rows.read(first + row)
                    place[: len(tokens)] = tokens
            return out

        shape = self.batch_size, rows.length + 1
        return global_array(shape, self.steps.batch_sharding, read)

    def generate(
        self,
        prompt: str = "",
        n_tokens: int = 200,
        temperature: float = 0.8,
        top_k: int | None = 200,
        seed: int = 1337,
        *,
        top_p: float | None = None,
        min_p: float | None = None,
        stop: Sequence[str] = (),
    ) -> str:
        """Return a prompt followed by generated text. See `generate_tokens` for the arguments.

        The generated text is cut off before the `stop` string that is completed first. An empty
        prompt becomes the end-of-text token, or token 0 if the tokenizer has no such token. Raises
        `UsageError` if an argument is invalid, if the model has no tokenizer, or if the tokenizer
        cannot encode the prompt.
        """
        sampling = Sampling(temperature, top_k, top_p, min_p)
        *_, (last,) = self.stream([prompt], n_tokens, sampling, [seed], stop)
        return last.text

    def stream(
        self,
        prompts: Sequence[str],
        n_tokens: int,
        sampling: Sampling,
        seeds: Sequence[int],
        stop: Sequence[str] = (),
        at_once: int | None = None,
    ) -> Iterator[list[Written]]:
        """Continue several prompts as one batch. Iterate over the texts so far, as they grow.

        Generation ends early when every text has reached a stop string. Up to rounding, a text does
        not depend on the other prompts.

        Args:
            prompts: one or more prompts, as for `generate`.
            n_tokens: maximum number of tokens to generate for each prompt.
            sampling: how to choose each token.
            seeds: a random seed for each prompt.
            stop: stop strings; see `generate`.
            at_once: number of tokens to generate between two yields. The default is
                `TOKENS_AT_ONCE` if there are stop strings, and otherwise `n_tokens`.

        Raises whatever `generate` raises.
        """
        _check_prompts(prompts, seeds)
        for prompt in prompts:
            if not isinstance(prompt, str):
                raise UsageError(
                    f"prompt={prompt!r}: must be a string; for token IDs, use generate_tokens"
                )
        tokenizer = self.tokenizer
        if not (isinstance(stop, list | tuple) and all(isinstance(s, str) and s for s in stop)):
            raise UsageError(f"stop={stop!r}: must be a list of non-empty strings")
        tokens = [prompt_tokens(tokenizer, prompt) for prompt in prompts]
        at_once = at_once or (TOKENS_AT_ONCE if stop else n_tokens)
        blocks = self.stream_tokens(tokens, n_tokens, sampling, seeds, at_once)

        def texts_so_far() -> Iterator[list[Written]]:
            found: list[list[int]] = [[] for _ in prompts]
            for block_BN in blocks:
                for new, block in zip(found, block_BN.tolist(), strict=True):
                    new += block
                is_last = len(found[0]) == n_tokens
                texts = [
                    text_so_far(prompt, continue_prompt(tokenizer, prompt, new), stop, is_last)
                    for prompt, new in zip(prompts, found, strict=True)
                ]
                yield texts
                if all(one.is_done for one in texts):
                    return

        return texts_so_far()

    def generate_tokens(
        self,
        tokens: Sequence[int] | np.ndarray,
        n_tokens: int,
        temperature: float = 0.0,
        top_k: int | None = None,
        seed: int = 0,
        *,
        top_p: float | None = None,
        min_p: float | None = None,
    ) -> list[int]:
        """Return `n_tokens` generated token IDs that continue a prompt.

        If the tokenizer is known, all of these IDs are less than its `vocab_size`. `top_k` and
        `top_p` also keep tokens that tie with a kept token; see `Sampling`.

        Args:
            tokens: token IDs of the prompt (n,), with n >= 1. Only the last `block_size` are used.
            n_tokens: number of tokens to generate, at least 1.
            temperature: sampling temperature; 0 always takes the most likely token.
            top_k: sample only from the `top_k` most likely tokens; None allows all tokens.
            seed: random seed, from 0 to 2^31 - 1.
            top_p: sample only from the smallest set of most likely tokens whose total probability
                reaches `top_p`.
            min_p: sample only from tokens that are at least `min_p` times as likely as the most
                likely one.

        Raises `UsageError` if the prompt is not a nonempty sequence of integers, if one of its last
        `block_size` tokens is not in the vocabulary, or if another argument is invalid.
        """
        sampling = Sampling(temperature, top_k, top_p, min_p)
        (block_BN,) = self.stream_tokens([tokens], n_tokens, sampling, [seed], n_tokens)
        return block_BN[0].tolist()

    def stream_tokens(
        self,
        prompts: Sequence[Sequence[int] | np.ndarray],
        n_tokens: int,
        sampling: Sampling,
        seeds: Sequence[int],
        at_once: int,
    ) -> Iterator[np.ndarray]:
        """Iterate over generated tokens that continue B prompts: int32 (B, N), N <= `at_once`.

        Each prompt gets `n_tokens` tokens in total, unless the caller stops iterating earlier. For
        the arguments, see `stream` and `generate_tokens`. Raises whatever `generate_tokens` raises.
        """
        sampling.check()
        _check_prompts(prompts, seeds)
        for key, value in (("n_tokens", n_tokens), ("at_once", at_once)):
            if not (is_count(value) and value < 2**30):  # positions are int32
                raise UsageError(
                    f"{key}={value!r}: must be a whole number, at least 1 and less than 2^30"
                )
        for seed in seeds:
            if not (is_integer(seed) and 0 <= seed < 2**31):
                raise UsageError(f"seed={seed!r}: must be a whole number from 0 to 2^31 - 1")
        given = [self._check_tokens(tokens, "(T,)", truncate=True) for tokens in prompts]
        return self._stream_tokens(given, n_tokens, sampling, seeds, at_once)

    def _stream_tokens(
        self,
        given: list[np.ndarray],
        n_tokens: int,
        sampling: Sampling,
        seeds: Sequence[int],
        at_once: int,
    ) -> Iterator[np.ndarray]:
        """Yield generated tokens; see `stream_tokens`. The arguments have been checked."""
        lengths_B = np.array([tokens.size for tokens in given], np.int32)
        windows_BP = np.zeros((len(given), self.row_length(int(max(lengths_B)))), np.int32)
        for window, tokens in zip(windows_BP, given, strict=True):
            window[: tokens.size] = tokens
        from jaxgpt.train.generate import cached_tokens

        seeds_B, B = np.array(seeds, np.int32), len(given)
        n_cached = np.int32(cached_tokens(self.config.model.n_positions, lengths_B.max()))
        start, extend = self._generator(B, n_tokens, sampling)
        text = self._call(start, windows_BP, lengths_B)
        for first in range(0, n_tokens, at_once):
            end = np.int32(min(first + at_once, n_tokens))
            text = self._call(extend, text, seeds_B, np.int32(first), n_cached, end)
            columns_BN = lengths_B[:, None] + np.arange(first, end)
            yield np.take_along_axis(np.asarray(text.tokens_S), columns_BN, axis=1)

    def _generator(self, n_texts: int, n_tokens: int, sampling: Sampling) -> Any:
        """Return the functions from `make_generator`, jitted for a batch of texts."""
        import jax

        from jaxgpt.train.generate import Text, make_generator

        key = n_texts, n_tokens, sampling
        if key not in self._generators:
            tokenizer = self.trained.tokenizer
            known = tokenizer.vocab_size if tokenizer else self._vocab_size
            start, extend = make_generator(
                self.steps.make_decoder, self.config.model.n_positions, known, n_tokens, sampling
            )
            whole: Any = self.steps.replicated
            jit = functools.partial(jax.jit, out_shardings=Text(whole, whole, None))
            self._generators[key] = (
                jit(over_texts(start, n_texts, (None, 0, 0))),
                jit(over_texts(extend, n_texts, (None, 0, 0, None, None, None)), donate_argnums=1),
            )
        return self._generators[key]


def _check_prompts(prompts: Any, seeds: Any) -> None:
    """Raise `UsageError` unless the arguments are non-empty sequences of the same length."""
    for key, value in (("prompts", prompts), ("seeds", seeds)):
        is_list = isinstance(value, Sized) and not isinstance(value, str | bytes | Mapping | Set)
        if not is_list or getattr(value, "ndim", 1) == 0 or not len(value):
            shown = shorten(repr(value))
            raise UsageError(f"{key}={shown}: must be a list with at least one element")
    if len(prompts) != len(seeds):
        shown = shorten(repr(seeds))
        raise UsageError(f"seeds={shown}: must have one seed for each of {len(prompts)} prompts")


def copied(arrays: Any) -> Any:
    """Return copies of the arrays in a tree, with the same shardings."""
    import jax

    return jax.tree.map(lambda array: array.copy(), arrays)


def check_exists(params: "Params", advice: str) -> None:
    """Raise `UsageError` if parameters have been deleted.

    Using deleted parameters may crash JAX. The message ends with "because a training step",
    followed by `advice`.
    """
    import jax

    if any(getattr(array, "is_deleted", bool)() for array in jax.tree.leaves(params)):
        raise UsageError(f"these parameters no longer exist, because a training step {advice}")


def is_count(number: object) -> bool:
    """Return whether `number` is a positive integer and not a bool."""
    return is_integer(number) and number >= 1


def is_integer(number: object) -> TypeGuard[int]:
    """Return whether `number` is a Python or NumPy integer and not a bool."""
    return isinstance(number, int | np.integer) and not isinstance(number, bool)


def over_texts(
    function: Callable[..., Any], n_texts: int, in_axes: tuple[int | None, ...]
) -> Callable[..., Any]:
    """Return a function equivalent to `jax.vmap(function, in_axes)` for `n_texts` texts.

    `in_axes` may contain only 0 and None. A single text is processed without `vmap`, because that
    is faster.
    """
    import jax

    if n_texts > 1:
        return jax.vmap(function, in_axes)

    def on_one(*operands: Any) -> Any:
        one = [
            operand if axis is None else jax.tree.map(lambda x: x[0], operand)
            for operand, axis in zip(operands, in_axes, strict=True)
        ]
        return jax.tree.map(lambda x: x[None], function(*one))

    return on_one


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
