"""A training job whose steps can be timed: the trainer's own loop, and the compiled step alone."""

import dataclasses
import itertools
import os
import resource
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxgpt.bench.scratch import end_on_signals
from jaxgpt.cluster.preemption import StopSignal
from jaxgpt.cluster.process_group import ProcessGroup
from jaxgpt.cluster.watchdog import Watchdog
from jaxgpt.config import UsageError, check_batch, mesh_sizes
from jaxgpt.data.loader import Loader
from jaxgpt.parallel.mesh import make_mesh
from jaxgpt.perf.profile import StepProfile, Tracing
from jaxgpt.perf.startup import Startup
from jaxgpt.runtime.dispatch import DispatchLimiter
from jaxgpt.runtime.initialize import end_job, preemption_sync_point
from jaxgpt.train.loop import run_steps
from jaxgpt.train.reporter import Reporter
from jaxgpt.train.run_directory import Run
from jaxgpt.train.setup import Trainer
from jaxgpt.train.state import TrainState, state_from_checkpoint
from jaxgpt.train.step import make_steps


class Clocks(NamedTuple):
    """Several clocks of this process: their readings, or what a step took by them."""

    seconds: float
    thread: float
    """Seconds that the thread which runs the steps has computed, and not waited."""
    process: float
    """The same of all threads together."""
    kernel: float
    """Of them, those that the operating system computed, to send data for instance."""

    @classmethod
    def read(cls) -> "Clocks":
        return cls(time.perf_counter(), time.thread_time(), time.process_time(), os.times().system)

    def since(self, began: "Clocks", n_steps: int) -> "Clocks":
        """What has passed for each of so many steps."""
        return Clocks(*((now - then) / n_steps for now, then in zip(self, began, strict=True)))


class Job:
    """A run that has been compiled, and its state.

    It is what the trainer's loop is given, but for evaluation and checkpoints: in their place the
    clock is read and the state is kept.
    """

    def __init__(self, run: Run, cluster: ProcessGroup, facts: dict[str, Any]):
        """Compiles the run's step and makes its initial state.

        Args:
            facts: what `initialize_jax` returned.
        """
        sizes = mesh_sizes(run.config, jax.device_count())
        check_batch(run.config, sizes)
        self.mesh = make_mesh(sizes, cluster.hosts)
        began = time.perf_counter()
        self.steps = make_steps(run.config, self.mesh)
        self.loader = Loader.for_training(run.dataset, run.config, self.steps.batch_shape.sharding)
        lowered = self.steps.lower_train_step()
        traced = time.perf_counter()
        self.train_step = lowered.compile()
        self.trace_seconds, self.compile_seconds = traced - began, time.perf_counter() - traced
        cluster.barrier()
        init = self.steps.init.lower().compile()
        cluster.barrier()
        self._state: TrainState = init()
        self._cluster, self.run = cluster, dataclasses.replace(run, resume_step=0)
        self._report = Reporter(run, self.steps, Startup(), cluster)
        self._report.log_header(facts, warnings=())
        self._report.start(self.loader)
        self._trainer = Trainer(
            cluster=cluster,
            steps=self.steps,
            train_step=self.train_step,
            loader=self.loader,
            evaluate=lambda step, params: None,
            sample=lambda step, params: None,
            checkpoints=self,
            report=self._report,
            stop=StopSignal(sync_point=preemption_sync_point),
            watchdog=Watchdog(run.config.train.hang_timeout, run.directory, cluster.rank, end_job),
            profile=StepProfile(run, cluster, self.train_step, self._report),
            ticks=itertools.count(1),
        )
        end_on_signals()
        self._ended = Clocks.read()
        # What the step alone is run on: all of it is on the device.
        self._step = jax.device_put(np.int32(1), self.steps.replicated)
        self._batch = self.loader.batch(1)

    def params(self) -> Any:
        """The parameters as they are now, as NumPy arrays."""
        return jax.device_get(self._state.params)

    def trainer(self, n_steps: int) -> Clocks:
        """Runs the trainer's loop for so many steps.

        Raises:
            UsageError: if it cannot go on, because losses are not finite.
        """
        self._cluster.barrier()
        first = self.run.resume_step
        run = dataclasses.replace(
            self.run, config=self.run.config.replace(train__max_iters=first + n_steps)
        )
        began = Clocks.read()
        end = run_steps(run, self._state, self._trainer)
        if end.failure:
            raise UsageError(end.failure)
        self.run = dataclasses.replace(self.run, resume_step=first + n_steps)
        return self._ended.since(began, n_steps)

    def alone(self, n_steps: int) -> Clocks:
        """Runs the compiled step, on the same batch every time."""
        in_flight = DispatchLimiter()
        self._cluster.barrier()
        began = Clocks.read()
        for _ in range(n_steps):
            self._state, metrics = self.train_step(self._state, self._step, self._batch)
            in_flight.add(metrics.loss)
        jax.block_until_ready(metrics)
        return Clocks.read().since(began, n_steps)

    def profile(self, n_steps: int, directory: Path) -> dict[str, Any]:
        """A trace of so many steps alone, as `perf.profile.summary` has it."""
        tracing = Tracing(directory, self._cluster)
        tracing.start(self._state)
        self.alone(n_steps)
        return tracing.stop(self._state, n_steps, self.train_step.as_text())

    def loader_seconds(self) -> float:
        """Of its thread, per batch: what it computes while nothing else runs."""
        found = []
        for step in range(1, 12):
            began = time.thread_time()
            self.loader.batch(step).block_until_ready()
            found.append(time.thread_time() - began)
        return statistics.median(found)

    def memory(self) -> dict[str, int | None]:
        """Bytes: of one device by the compiler's account and at its own highest, if it keeps one;
        and of the process at its highest."""
        planned = self.train_step.memory_analysis()
        kept = jax.local_devices()[0].memory_stats() or {}
        return {
            "device_compiled_bytes": planned.argument_size_in_bytes
            + planned.output_size_in_bytes
            - planned.alias_size_in_bytes
            + planned.temp_size_in_bytes,
            "device_peak_bytes": kept.get("peak_bytes_in_use"),
            "process_peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        }

    def check(self) -> None:
        """The loop calls it before each step; nothing is being saved."""

    def close(self) -> None:
        """The loop calls it when it ends."""

    def save(self, step: int, tree: dict[str, Any], meta: dict[str, Any]) -> None:
        """The loop calls it after the last step of a round, which is done and reported."""
        self._ended = Clocks.read()
        self._state = state_from_checkpoint(tree, meta, self.steps.state_shapes)
