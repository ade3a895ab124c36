"""Setup of a run before its first step: mesh, jitted functions, state, data and logs."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from jaxgpt.checkpoint.checkpointer import Checkpoints
from jaxgpt.checkpoint.replicas import has_replicas
from jaxgpt.cluster.process_group import ProcessGroup
from jaxgpt.cluster.stopping import StopSignal
from jaxgpt.cluster.timeouts import SLOW_PHASE
from jaxgpt.config import Config, MeshShape, UsageError
from jaxgpt.data.loader import Loader
from jaxgpt.parallel.mesh import describe, device_hosts, job_mesh, tensor_crosses_hosts_warning
from jaxgpt.parallel.sharding import Params
from jaxgpt.perf.clock import Clock
from jaxgpt.perf.memory import check_memory
from jaxgpt.perf.profile import StepProfile
from jaxgpt.runtime.compile_cache import CacheUse
from jaxgpt.spikes.faults import check_faults, with_bit_flip
from jaxgpt.tracking.records import EvalRecord, SampleRecord
from jaxgpt.train.evaluate import make_evaluator, make_sampler
from jaxgpt.train.jitted import JittedFunctions, make_steps
from jaxgpt.train.reporting.reporter import Reporter
from jaxgpt.train.restart import Cause, Job, restart_from
from jaxgpt.train.run_directory import Run
from jaxgpt.train.state import TrainState, checkpoint_tree
from jaxgpt.train.step import Metrics


class LoopParts(NamedTuple):
    """The parts of a run that the training loop uses.

    They stay the same across restarts, except for the batch sizes of `loader`.
    """

    job: Job
    train_step: Callable[..., tuple[TrainState, Metrics]]  # the compiled `train_step`
    loader: Loader
    evaluate: Callable[[int, Params], EvalRecord]
    sample: Callable[[int, Params], SampleRecord | None]
    stop: StopSignal
    profile: StepProfile
    # Number of steps started, for `StopSignal`. Unlike the step number, this does not decrease on a
    # rewind. The count starts at 1, because JAX sets its sync point to 1 if a signal arrives before
    # the first step.
    ticks: Iterator[int]


def set_up(
    run: Run,
    cluster: ProcessGroup,
    facts: dict[str, Any],
    stop: StopSignal,
    clock: Clock,
    checkpoints: Checkpoints,
) -> tuple[Run, LoopParts, TrainState] | None:
    """Return the run, its parts and the state to start from, or None if there is nothing to do.

    If there is nothing to do, this closes the run's log. If the newest checkpoint is damaged, the
    returned run resumes from an older one. `facts` is the result of `initialize_jax`. All processes
    call this together. On process 0, raises `BrokenPipeError` if the output pipe is closed.
    """
    clock.enter("setup")
    config = run.config
    mesh = job_mesh(config, cluster.hosts)
    check_memory(config, MeshShape(**mesh.shape), cluster.local_size)
    check_faults(config, mesh.size)
    cache_use, has_masks = CacheUse(), run.dataset.has_masks
    steps = make_steps(config, mesh, has_masks=has_masks, hosts=cluster.hosts)
    _check_copies(config, steps)
    report = Reporter(run, steps, clock, cluster)
    report.log_header(facts, _layout_warnings(steps, cluster))
    stop.say, checkpoints.log = report.info, report.log
    stop.outlive_reader = report.outlive_reader
    if (run.resume_step or 0) < config.train.max_iters:
        checkpoints.open(checkpoint_tree(steps.state_shapes))
    elif not run.missing_records:
        line = (
            f"nothing to do: step {run.resume_step} is saved, "
            f"train.max_iters={config.train.max_iters}; give a larger value to continue"
        )
        failure = run.resume_meta.get("failure")
        if failure is not None:
            line = f"error: the run has failed at step {run.resume_step}: {failure}"
        report.close(line, has_failed=failure is not None)
        return None

    cluster.monitor.heartbeat("the setup of the state", SLOW_PHASE)
    clock.enter("state")
    job = Job(cluster, steps, checkpoints, report)
    run, state = restart_from(run.resume_step, Cause(), run, job)
    report.log_resume()
    cluster.monitor.heartbeat("the compilation of the step", SLOW_PHASE)
    clock.enter("compile")
    report.info("compiling the training step ...")
    train_step = steps.lower_train_step().compile()
    cluster.barrier()
    report.compile_cache = str(cache_use)
    clock.enter("setup")
    parts = LoopParts(
        job=job,
        train_step=with_bit_flip(train_step, config),
        loader=Loader.for_training(run.dataset, config, steps.batch_sharding),
        evaluate=make_evaluator(run.dataset, config, steps, cluster.monitor.heartbeat),
        sample=make_sampler(run.dataset, config, steps),
        stop=stop,
        profile=StepProfile(run, cluster, train_step, report),
        ticks=itertools.count(1),
    )
    return run, parts, state


def _layout_warnings(steps: JittedFunctions, cluster: ProcessGroup) -> tuple[str, ...]:
    """Return the warnings for `steps`, plus one if the `tensor` axis spans several hosts."""
    shape, hosts = MeshShape(**steps.mesh.shape), device_hosts(steps.mesh, cluster.hosts)
    return (*steps.warnings, *tensor_crosses_hosts_warning(shape, hosts))


def _check_copies(config: Config, steps: JittedFunctions) -> None:
    """Raise `UsageError` if train.verify_interval is set but most parameters have no replica."""
    every = config.train.verify_interval
    if every > 0 and not has_replicas(steps.state_shapes.params):
        raise UsageError(
            f"train.verify_interval={every}: mesh {describe(steps.mesh)} "
            "has no replicas of most parameters, so there is nothing to compare; set "
            "train.verify_interval=0, or use data > 1 or a parallel.zero_stage below 3"
        )
