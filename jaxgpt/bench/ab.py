"""Time per step with and without changes to settings, XLA options or JAX options.

All variants of the step are compiled in one process, and take turns training the same state.
"""

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from jaxgpt.bench.harness import PROG, BenchJob, Result, Value, open_job, spread
from jaxgpt.bench.rounds import Rounds
from jaxgpt.bench.step import ROUNDS, steps_per_round
from jaxgpt.config import Config, UsageError, mesh_shape, parse_args, parse_yaml
from jaxgpt.data.dataset import with_planned_vocabulary
from jaxgpt.perf.hlo import parse_hlo
from jaxgpt.perf.roofline import read_work
from jaxgpt.train.init_from import initial_model
from jaxgpt.train.jitted import JittedFunctions, make_steps

UNCHANGED = "unchanged"


class Change(NamedTuple):
    """A change to the step, parsed from arguments such as `xla_gpu_autotune_level=0`."""

    config: Config
    xla_options: dict[str, Any]
    jax_options: dict[str, Any]


def run(
    settings: Sequence[str], change: Sequence[str], steps: int | None = None, rounds: int = ROUNDS
) -> Result:
    """Time the unchanged compiled step, and the step with each `change`.

    `settings` are command-line settings. See `parse_change` for the format of a change. In each of
    the `rounds` rounds, every variant runs `steps` steps. If `steps` is None, `steps_per_round`
    chooses the number of steps. All variants use random tokens as data.

    Raises `UsageError` if the job has several processes, if a setting is invalid, if JAX or XLA
    rejects an option, or if a change without options has no effect on the step. Also raises
    `UsageError` if a change affects the mesh, the data (except data.document_mask), the vocabulary,
    or the shapes or shardings of the state or the batch. Raises `ValueError` or `TypeError` if the
    step does not work with a JAX option.
    """
    config = parse_args(settings, PROG, initial_model)
    changes = {text: parse_change(text, settings) for text in change}
    for text, each in changes.items():
        if _shared(each.config) != _shared(config):
            raise UsageError(
                f"--change={text}: changes the mesh, the data or the vocabulary, but all variants "
                "of the step share them; time each variant with bench step"
            )
    with open_job(config, single_process=True) as job:
        job.start_jax(config)
        for text, each in changes.items():
            _check_options(text, each)
        base = Rounds(job, config, synthetic=True)
        programs, seconds_to_compile = {UNCHANGED: base.parts.train_step}, {}
        for text, each in changes.items():
            job.log(f"compiling the step with {text}")
            began = time.perf_counter()
            programs[text] = _compile(text, each, base)
            seconds_to_compile[text] = time.perf_counter() - began
        for program in programs.values():
            base.run_compiled_step(1, program)
        n_steps = steps or steps_per_round(base)
        found = _time_rounds(job, base, programs, rounds, n_steps)
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
    """Parse `text` into a change. `settings` are the settings of the unchanged step.

    Words that begin with xla_ or jax_ (with or without --) are XLA or JAX options. All other words
    are settings. Values of JAX options are parsed as YAML. Values of XLA options are strings,
    except true and false, which are parsed as booleans. Raises `UsageError` if an option is not
    followed by `=`, or if the value of a JAX option is malformed. Does not check whether options
    exist, or whether values such as the optimizer's name are known.
    """
    options: dict[str, dict[str, Any]] = {"xla_": {}, "jax_": {}}
    words = []
    for word in text.split():
        name, equals, value = word.removeprefix("--").partition("=")
        if name[:4] not in options:
            words.append(word)
        elif not equals:
            raise UsageError(f"--change={text}: {name} has no value; write {name}=VALUE")
        elif name.startswith("xla_"):
            known = {"true": True, "false": False}
            options["xla_"][name] = known.get(value.lower(), value)
        else:
            try:
                options["jax_"][name] = parse_yaml(value)
            except ValueError:
                raise UsageError(f"--change={text}: {name} has a malformed value") from None
    config = parse_args([*settings, *words], PROG, initial_model)
    return Change(config, options["xla_"], options["jax_"])


def _shared(config: Config) -> tuple[Any, ...]:
    """Return the settings that all variants of the step share."""
    data = dataclasses.replace(config.data, document_mask=False)
    return mesh_shape(config), data, config.model.vocab_size


def _time_rounds(
    job: BenchJob, base: Rounds, programs: dict[str, Callable[..., Any]], rounds: int, steps: int
) -> dict[str, list[float]]:
    """Time every program in each round. Return each program's seconds per step in every round."""
    found: dict[str, list[float]] = {text: [] for text in programs}
    for number in range(rounds):
        job.log(f"round {number + 1} of {rounds}, {steps} steps of each variant")
        turns = list(programs.items())
        for text, program in turns if number % 2 else reversed(turns):
            found[text].append(base.run_compiled_step(steps, program))
    return found


def _compile(text: str, change: Change, base: Rounds) -> Callable[..., Any]:
    """Compile the step with a change.

    Raises `UsageError` if the change has only settings and none of them affects the step, or if it
    affects the shapes, dtypes or shardings of the state or the batch.
    """
    ours = base.run.config
    config = change.config.replace(data=ours.data, model__vocab_size=ours.model.vocab_size)
    config = config.replace(data__document_mask=change.config.data.document_mask)
    hosts = base.parts.job.cluster.hosts
    steps = make_steps(with_planned_vocabulary(config), base.mesh, hosts=hosts)

    def arguments(of: JittedFunctions) -> Any:
        return jax.tree.map(
            lambda a: (a.shape, a.dtype, a.sharding), (of.state_shapes, of.batch_shape)
        )

    if arguments(steps) != arguments(base.steps):
        raise UsageError(
            f"--change={text}: changes the shapes or shardings of the state or the batch, so the "
            "two steps cannot take turns; time each step with bench step"
        )
    with _jax_options(change.jax_options):
        lowered = steps.lower_train_step()
        has_options = change.xla_options or change.jax_options
        if not has_options and lowered.as_text() == base.steps.lower_train_step().as_text():
            raise UsageError(
                f"--change={text}: does not change the compiled step; time each training loop "
                "with bench step"
            )
        return lowered.compile(change.xla_options)


def _check_options(text: str, change: Change) -> None:
    """Raise `UsageError` if JAX or XLA rejects an option or its value."""
    try:
        with _jax_options(change.jax_options):
            jax.jit(lambda x: x + 1).lower(0).compile(change.xla_options)
    except (AttributeError, ValueError, TypeError, RuntimeError) as error:
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
    """Return the number of bytes that each program reads and writes, according to `read_work`."""
    return {
        text: sum(work.moved for work in read_work(parse_hlo(program.as_text())).values())
        for text, program in programs.items()
    }
