"""Time per step with changed settings, XLA options or JAX options, compared with no change.

All variants of the step are compiled in one process, and take turns training the same state.
"""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from jaxgpt.bench.harness import PROG, Result, Value, open_job, spread
from jaxgpt.bench.rounds import Rounds
from jaxgpt.bench.step import ROUNDS, steps_per_round
from jaxgpt.config import Config, UsageError, parse_args
from jaxgpt.perf.hlo import parse_hlo
from jaxgpt.perf.roofline import read_work
from jaxgpt.train.compiled import CompiledFunctions, make_steps
from jaxgpt.train.resume import initial_model

UNCHANGED = "unchanged"


class Change(NamedTuple):
    """A change to the step, parsed from words such as `xla_gpu_autotune_level=0`."""

    config: Config
    xla_options: dict[str, Any]
    jax_options: dict[str, Any]


def run(
    settings: Sequence[str], change: Sequence[str], steps: int | None = None, rounds: int = ROUNDS
) -> Result:
    """Time `rounds` rounds of `steps` compiled steps, without a change and with each `change`.

    `settings` are command-line settings. In each round, every variant runs `steps` steps; by
    default, this takes about 1.5 seconds.

    Raises `UsageError` if a setting is invalid, if an option is unknown, or if a change affects the
    shapes or shardings of the state or the batch. Also raises whatever `open_job` and `Rounds`
    raise.
    """
    config = parse_args(settings, PROG, initial_model)
    changes = {text: parse_change(text, settings) for text in change}
    with open_job(config, single_process=True) as job:
        job.start_jax(config)
        for text, each in changes.items():
            _check_options(text, each)
        base = Rounds(job, config, synthetic=True)
        programs, seconds_to_compile = {UNCHANGED: base.trainer.train_step}, {}
        for text, each in changes.items():
            job.log(f"compiling the step with {text}")
            began = time.perf_counter()
            programs[text] = _compile(text, each, base)
            seconds_to_compile[text] = time.perf_counter() - began
        for program in programs.values():
            base.run_compiled_step(1, program)
        n_steps = steps or steps_per_round(base)
        found: dict[str, list[float]] = {text: [] for text in programs}
        for number in range(rounds):
            job.log(f"round {number + 1} of {rounds}, {n_steps} steps of each variant")
            turns = list(programs.items())
            for text, program in turns if number % 2 else reversed(turns):
                found[text].append(base.run_compiled_step(n_steps, program))
        unchanged = found[UNCHANGED]
        ratios = {
            text: spread([b / a for a, b in zip(unchanged, found[text], strict=True)])
            for text in changes
        }
        return {
            "config": config.config,
            "mesh": dict(base.mesh.shape),
            "device_kind": base.mesh.devices.flat[0].device_kind,
            "rounds": rounds,
            "steps_per_round": n_steps,
            "seconds_per_step": Value(
                {text: statistics.median(seconds) for text, seconds in found.items()}, "s"
            ),
            "ratio": Value(ratios, "x", "time per step relative to the unchanged step"),
            "bytes_moved": Value(
                _bytes_moved(programs), "bytes", "each operation reads and writes once"
            ),
            "compile_seconds": Value(seconds_to_compile, "s", f"with tracing; {base.cache}"),
        }


def parse_change(text: str, settings: Sequence[str]) -> Change:
    """Return the change that `text` describes. `settings` are those of the unchanged step.

    Words that begin with xla_ or jax_ are options of XLA or JAX, and the others are settings.
    Raises `UsageError` if a setting is invalid or an option has no value.
    """
    options: dict[str, dict[str, Any]] = {"xla_": {}, "jax_": {}}
    words = []
    for word in text.split():
        name, equals, value = word.removeprefix("--").partition("=")
        if name[:4] not in options:
            words.append(word)
        elif not equals:
            raise UsageError(f"--change={text}: {name} has no value; write {name}=VALUE")
        else:
            known = {"true": True, "false": False}
            options[name[:4]][name] = known.get(value.lower(), value)
    config = parse_args([*settings, *words], PROG, initial_model)
    return Change(config, options["xla_"], options["jax_"])


def _compile(text: str, change: Change, base: Rounds) -> Callable[..., Any]:
    """Compile the step with a change. Raises `UsageError` if the state or the batch differs."""
    ours = base.run.config
    config = change.config.replace(data=ours.data, model__vocab_size=ours.model.vocab_size)
    steps = make_steps(
        config.replace(data__document_mask=change.config.data.document_mask), base.mesh
    )

    def arguments(of: CompiledFunctions) -> Any:
        return jax.tree.map(
            lambda a: (a.shape, a.dtype, a.sharding), (of.state_shapes, of.batch_shape)
        )

    if arguments(steps) != arguments(base.steps):
        raise UsageError(
            f"--change={text}: changes the shapes or shardings of the state or the batch, so the "
            "two steps cannot take turns; compare them with bench step"
        )
    with _jax_options(change.jax_options):
        return steps.lower_train_step().compile(change.xla_options)


def _check_options(text: str, change: Change) -> None:
    """Raise `UsageError` if JAX or XLA rejects an option or its value."""
    try:
        with _jax_options(change.jax_options):
            jax.jit(lambda x: x + 1).lower(0).compile(change.xla_options)
    except (AttributeError, ValueError, TypeError, jax.errors.JaxRuntimeError) as error:
        first = str(error).partition("\n")[0]
        raise UsageError(f"--change={text}: {first}; correct or remove this option") from None


@contextlib.contextmanager
def _jax_options(options: dict[str, Any]) -> Iterator[None]:
    before = {name: getattr(jax.config, name) for name in options}
    try:
        for name, value in options.items():
            jax.config.update(name, value)
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def _bytes_moved(programs: dict[str, Any]) -> dict[str, int]:
    """Return the bytes that each program reads and writes, according to `read_work`."""
    return {
        text: sum(work.moved for work in read_work(parse_hlo(program.as_text())).values())
        for text, program in programs.items()
    }
