"""Rounds of training steps, either in the training loop or with the compiled step alone."""

import contextlib
import dataclasses
import io
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np

from jaxgpt.bench.harness import BenchJob
from jaxgpt.config import Config, DataConfig, UsageError, is_changed, mesh_shape
from jaxgpt.data.dataset import dataset_directory, vocabulary_size, with_planned_vocabulary
from jaxgpt.optim.schedule import learning_rate
from jaxgpt.perf.clock import Clock
from jaxgpt.perf.profile import Tracing
from jaxgpt.runtime.compile_cache import use_compile_cache
from jaxgpt.runtime.dispatch import DispatchLimiter
from jaxgpt.runtime.initialize import initialize_jax
from jaxgpt.train.loop import run_steps
from jaxgpt.train.run_directory import prepare_run
from jaxgpt.train.setup import set_up
from jaxgpt.train.state import state_from_checkpoint

SYNTHETIC_TOKENS = 2**20


class Rounds:
    """A run that is set up as in jaxgpt.train, and trained in rounds.

    The state carries over from round to round. All processes must call each method.
    """

    def __init__(self, job: BenchJob, config: Config, synthetic: bool = False):
        """Start JAX, compile the step and initialize the state.

        Random tokens replace the data if `synthetic` is set or if data.dataset is needed but
        missing. The compile cache is empty unless `compile_cache` differs from its default. Raises
        `OSError` if the random tokens cannot be written.
        """
        cluster = job.cluster
        config, self.data = _with_data(config, synthetic, job)
        self.run = prepare_run(_steps_only(config, job.folder / "run"), cluster)
        facts = initialize_jax(cluster, mesh_shape(self.run.config))
        cached = is_changed(config, "compile_cache")
        use_compile_cache(config.compile_cache if cached else str(job.folder / "compiled"), cluster)
        job.log("compiling the step")
        clock = Clock()
        never = SimpleNamespace(reached=lambda tick: False)
        self._quiet = contextlib.redirect_stdout(io.StringIO())
        with self._quiet:
            checkpoints = NoCheckpoints(self._keep_state)
            _, parts, self.state = set_up(self.run, cluster, facts, never, clock, checkpoints)
            parts.job.report.start(parts.loader)
        self.parts = parts._replace(evaluate=lambda *_: None, sample=lambda *_: None)
        self.steps, self.mesh = parts.job.steps, parts.job.steps.mesh
        self.compile_seconds = clock.spent("compile")
        self.cache = f"cache: {parts.job.report.compile_cache}" if cached else "without a cache"
        # Each round is like a resumed run, so the data continues where the last round ended.
        sizes = {"batch_sizes": self.run.batch_sizes.changes}
        self.run = dataclasses.replace(self.run, resume_step=0, resume_meta=sizes)
        # `run_compiled_step` reuses these arguments, which are already on the devices.
        scalars = np.int32(1), learning_rate(config.optimizer, 1)
        scalars = jax.device_put(scalars, self.steps.replicated)
        self._step_arguments = *scalars, parts.loader.batch(1)

    def train(self, n_steps: int) -> float:
        """Run `n_steps` >= 1 steps in the training loop. Return this process's seconds per step.

        Output to stdout is discarded. Raises `UsageError` if `run_steps` returns a failure.
        """
        last = self.run.resume_step + n_steps
        run = dataclasses.replace(self.run, config=self.run.config.replace(train__max_iters=last))
        self.parts.job.cluster.barrier()
        began = time.perf_counter()
        with self._quiet:
            failure = run_steps(run, self.state, self.parts).failure
        seconds = time.perf_counter() - began
        if failure:
            raise UsageError(failure)
        self.run = dataclasses.replace(self.run, resume_step=last)
        return seconds / n_steps

    def run_compiled_step(self, n_steps: int, step: Callable[..., Any] | None = None) -> float:
        """Run the compiled step `n_steps` >= 1 times on one batch.

        Returns this process's seconds per step. If `step` is given, it runs instead of the compiled
        step, with the same arguments and results.
        """
        step, in_flight = step or self.parts.train_step, DispatchLimiter()
        self.parts.job.cluster.barrier()
        began = time.perf_counter()
        for _ in range(n_steps):
            self.state, metrics = step(self.state, *self._step_arguments)
            in_flight.add(metrics.loss)
        jax.block_until_ready(metrics)
        return (time.perf_counter() - began) / n_steps

    def profile(self, n_steps: int, directory: Path) -> dict[str, Any]:
        """Run the compiled step `n_steps` >= 1 times while recording a profiler trace.

        Process 0 writes its trace to `directory`. Returns the result of `Tracing.stop`. Raises
        `OSError` if a process other than 0 cannot create a temporary folder.
        """
        tracing = Tracing(directory, self.parts.job.cluster, self.state)
        seconds = self.run_compiled_step(n_steps)
        return tracing.stop(self.state, n_steps, seconds, self.parts.train_step.as_text())

    def _keep_state(self, tree: dict[str, Any], meta: dict[str, Any]) -> None:
        self.state = state_from_checkpoint(tree, meta, self.steps.state_shapes)


class NoCheckpoints:
    """Serves as the run's `Checkpoints`, but writes nothing.

    The training loop saves its state at the end of a round. `keep` receives this state.
    """

    def __init__(self, keep: Callable[[dict[str, Any], dict[str, Any]], None]):
        self._keep = keep

    def open(self, shapes: Any) -> None:
        pass

    def check(self) -> None:
        pass

    def is_due(self, step: int) -> bool:
        return False

    def newest_complete(self) -> None:
        return None

    def remove_local_after(self, step: int) -> None:
        pass

    def save(self, step: int, tree: dict[str, Any], meta: dict[str, Any]) -> None:
        self._keep(tree, meta)

    def close(self, is_final: bool) -> None:
        pass


def _with_data(config: Config, synthetic: bool, job: BenchJob) -> tuple[Config, str]:
    """Return `config`, with random tokens as data if necessary, and a description of the data.

    Random tokens in the job's folder replace the data if `synthetic` is set, or if the data comes
    from data.dataset and this dataset has no train.bin. The dataset `python` counts as present,
    because `prepare_run` creates it. All processes must call this.
    """
    data = config.data
    given = data.path or data.file_list or " ".join(data.blend)
    home = dataset_directory(data)
    is_missing = not given and data.dataset != "python" and not (home / "train.bin").exists()
    if not job.cluster.broadcast(synthetic or is_missing):
        return config, given or data.dataset
    vocab_size = job.cluster.run_on_all(vocabulary_size, data, config.model)
    least = config.model.block_size + 1
    if job.cluster.local_rank == 0:  # files without meta.json are uint16
        random = np.random.default_rng(config.train.seed)
        for name, size in (("train.bin", max(least, SYNTHETIC_TOKENS)), ("val.bin", least)):
            tokens = random.integers(min(vocab_size, 2**16), size=size, dtype="<u2")
            tokens.tofile(job.folder / name)
    job.cluster.barrier()
    reason = "--synthetic" if synthetic else f"there is no {home}"
    ends = with_planned_vocabulary(config).data.end_of_text
    made = DataConfig(path=str(job.folder), document_mask=data.document_mask, end_of_text=ends)
    config = config.replace(data=made, model__vocab_size=vocab_size)
    return config, f"random tokens, because {reason}"


def _steps_only(config: Config, directory: Path) -> Config:
    """Return a config with the same training steps, but no work between the steps.

    Skip ranges, profiles, evaluations, samples, trackers, checkpoints, rewinds, comparisons of
    replicas and bit flips are turned off.
    """
    action = config.spike.action
    return config.replace(
        out=str(directory),
        train_range_to_skip=(),
        profile_steps=None,
        train__max_iters=2**31 - 1,  # set by each round
        train__eval_interval=0,
        train__sample_tokens=0,
        train__trackers=(),
        train__verify_interval=0,
        checkpoint__interval=0,
        faults__bit_flip_step=None,
        faults__bit_flip_device=0,
        spike__action="log" if action == "rewind" else action,  # compiles the same step
    )
