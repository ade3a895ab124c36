"""Training steps to be timed: in the trainer's loop and alone, beside large matrix products."""

import dataclasses
import itertools
import os
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxgpt.cluster.preemption import StopSignal
from jaxgpt.cluster.process_group import ProcessGroup
from jaxgpt.cluster.watchdog import Watchdog
from jaxgpt.config import UsageError
from jaxgpt.data.loader import Loader
from jaxgpt.parallel.mesh import job_mesh
from jaxgpt.perf.profile import StepProfile, Tracing
from jaxgpt.perf.startup import Startup
from jaxgpt.runtime.dispatch import DispatchLimiter
from jaxgpt.runtime.initialize import end_job, preemption_sync_point
from jaxgpt.train.functions import make_steps
from jaxgpt.train.loop import run_steps
from jaxgpt.train.reporting.reporter import Reporter
from jaxgpt.train.run_directory import Run
from jaxgpt.train.setup import Trainer
from jaxgpt.train.state import TrainState, state_from_checkpoint

CPU_SIZES = (512, 1024, 2048)
ACCELERATOR_SIZES = (2048, 4096, 8192)
MATMUL_SECONDS = 0.15  # of one measurement, about


class Clocks(NamedTuple):
    """Readings of several clocks of this process, or the seconds of a step by each of them."""

    seconds: float
    thread: float
    """CPU time of the thread that runs the steps."""
    process: float
    """CPU time of all threads together."""
    kernel: float
    """Part of `process` that the operating system computed, to send data for instance."""

    @classmethod
    def read(cls) -> "Clocks":
        return cls(time.perf_counter(), time.thread_time(), time.process_time(), os.times().system)

    def since(self, began: "Clocks", n_steps: int) -> "Clocks":
        """Return the seconds that have passed, for each of so many steps."""
        return Clocks(*((now - then) / n_steps for now, then in zip(self, began, strict=True)))


class Job:
    """A compiled run and its state, whose steps are run in rounds.

    The trainer's loop gets it in place of the checkpoints: it saves after the last step of a
    round, and `save` reads the clocks and keeps the state.
    """

    def __init__(self, run: Run, cluster: ProcessGroup, facts: dict[str, Any]):
        """Compile the run's step and make its initial state; `StopSignal` takes signals over.

        Args:
            facts: returned by `initialize_jax`.
        """
        self.mesh = job_mesh(run.config, cluster.hosts)
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
        self.cluster, self.run = cluster, dataclasses.replace(run, resume_step=0)
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
        self._ended = Clocks.read()
        # The compiled step alone gets the same arguments each time, which are on the device.
        self._step = jax.device_put(np.int32(1), self.steps.replicated)
        self._batch = self.loader.batch(1)

    def params(self) -> Any:
        """Return the parameters of now as NumPy arrays."""
        return jax.device_get(self._state.params)

    def trainer(self, n_steps: int) -> Clocks:
        """Run the trainer's loop for so many steps; return the clocks of one.

        Raises:
            UsageError: if the run cannot go on, because losses are not finite.
        """
        self.cluster.barrier()
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
        """Run the compiled step alone, on the same batch every time; return the clocks of one."""
        in_flight = DispatchLimiter()
        self.cluster.barrier()
        began = Clocks.read()
        for _ in range(n_steps):
            self._state, metrics = self.train_step(self._state, self._step, self._batch)
            in_flight.add(metrics.loss)
        jax.block_until_ready(metrics)
        return Clocks.read().since(began, n_steps)

    def profile(self, n_steps: int, directory: Path) -> dict[str, Any]:
        """Trace so many steps alone, and return what `Tracing.stop` found."""
        tracing = Tracing(directory, self.cluster, self._state)
        self.alone(n_steps)
        return tracing.stop(self._state, n_steps, self.train_step.as_text())

    def loader_seconds(self) -> float:
        """Return the CPU seconds of the loader's thread for a batch, while nothing else runs."""
        found = []
        for step in range(1, 12):
            began = time.thread_time()
            self.loader.batch(step).block_until_ready()
            found.append(time.thread_time() - began)
        return statistics.median(found)

    def memory(self) -> dict[str, int | None]:
        """Return bytes: of a device by the compiler's account, and peaks of device and process.

        A device that keeps no account of its peak has None.
        """
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
        """Do nothing before a step: nothing is being saved."""

    def close(self) -> None:
        """Do nothing at the end of a round."""

    def save(self, step: int, tree: dict[str, Any], meta: dict[str, Any]) -> None:
        """Read the clocks after the last step of a round, and keep its state."""
        self._ended = Clocks.read()
        self._state = state_from_checkpoint(tree, meta, self.steps.state_shapes)


def fastest_size(dtype: str, cluster: ProcessGroup) -> int:
    """Return the size of square matrices, of several, whose products are fastest."""
    sizes = CPU_SIZES if jax.default_backend() == "cpu" else ACCELERATOR_SIZES
    return cluster.broadcast(max(sizes, key=lambda size: matmul_rate(size, dtype, cluster)()))


def matmul_rate(size: int, dtype: str, cluster: ProcessGroup) -> Callable[[], float]:
    """Return a function that measures the job's FLOP/s in products of size x size matrices.

    All devices of the job multiply at the same time, each matrices of its own. CPU devices share
    the cores: the rate is that of the machine, not that of one device times n.
    """
    devices = np.array(jax.devices())
    mesh = Mesh(devices, ("device",), axis_types=(AxisType.Auto,))
    each = PartitionSpec("device")
    draw = jax.jit(
        lambda key: jax.random.normal(key, (devices.size, size, size), dtype),
        out_shardings=NamedSharding(mesh, each),
    )

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(each, each), out_specs=each)
    def multiply(a: jax.Array, b: jax.Array) -> jax.Array:
        return (a[0] @ b[0])[None]

    a, b = draw(jax.random.key(0)), draw(jax.random.key(1))

    def seconds(times: int) -> float:
        cluster.barrier()
        began = time.perf_counter()
        for _ in range(times):
            out = multiply(a, b)
        out.block_until_ready()
        # The slowest process: the first to end has had more than its share of the cores.
        return max(cluster.allgather(time.perf_counter() - began)) / times

    seconds(1)  # compiles
    one = statistics.median(seconds(1) for _ in range(3))
    times = max(1, round(MATMUL_SECONDS / one))
    return lambda: 2 * size**3 * devices.size / seconds(times)
