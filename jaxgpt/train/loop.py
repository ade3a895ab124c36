"""A run from its first step to its last: `run_steps` is what happens."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxgpt.checkpoint.checkpointer import Checkpoints
from jaxgpt.checkpoint.replicas import devices_that_differ
from jaxgpt.cluster import shutdown as exits
from jaxgpt.cluster.process_group import ProcessGroup
from jaxgpt.cluster.stopping import StopSignal
from jaxgpt.cluster.timeouts import SLOW_PHASE
from jaxgpt.config import UsageError, should_evaluate, should_run_every, skip_ranges
from jaxgpt.optim.schedule import learning_rate
from jaxgpt.parallel.mesh import describe
from jaxgpt.perf.clock import Clock
from jaxgpt.runtime.dispatch import DispatchLimiter
from jaxgpt.spikes.policy import NoRewind
from jaxgpt.spikes.skip import SkipRanges
from jaxgpt.train.reporting.metrics import MetricsBuffer, StepMetrics
from jaxgpt.train.restart import DeviceFailed, after_corruption, before_spike, restart_from
from jaxgpt.train.resume import EVAL_RECORDS
from jaxgpt.train.run_directory import Run
from jaxgpt.train.setup import Trainer, set_up
from jaxgpt.train.state import TrainState, checkpoint_json, checkpoint_tree


class StepsResult(NamedTuple):
    """How a stretch of steps ended."""

    step: int
    stopping: bool = False  # whether a signal or the time limit did it
    spike: StepMetrics | None = None  # what calls for a rewind
    differ: tuple[int, ...] = ()  # devices whose parameters are not those of their copies
    failure: str = ""  # why the run cannot go on


def train(
    run: Run,
    cluster: ProcessGroup,
    facts: dict[str, Any],
    stop: StopSignal,
    clock: Clock,
) -> int:
    """Train until train.max_iters, or until `stop` says so; return the exit status.

    It is `exits.DONE`; `exits.STOPPED` with a checkpoint saved; or `exits.FAILED` if spikes or
    steps that are not finite cannot be got over. `facts` are what `initialize_jax` returned.
    """
    checkpoints = Checkpoints(run.directory, run.config, cluster, stop.allow_for_save)
    ready = set_up(run, cluster, facts, stop, clock, checkpoints)
    if ready is None:
        return exits.DONE
    run, trainer, state = ready
    trainer.job.report.start(trainer.loader)
    try:
        if run.missing_records:
            evaluate_and_sample(trainer, run.resume_step or 0, state, run.missing_records)
        result = run_with_restarts(run, state, trainer)
    except UsageError:  # the data has gone: finish the checkpoint that is being saved
        if cluster.size == 1:  # it takes all processes, and the others may not come
            trainer.job.checkpoints.close(is_final=False)
        raise
    return close_run(run, trainer, result)


def close_run(run: Run, trainer: Trainer, result: StepsResult) -> int:
    """Say how a run ended, close its logs, and return its exit status."""
    step, close = result.step, trainer.job.report.close
    if result.failure:
        close(result.failure, has_failed=True)
        return exits.FAILED
    if step >= run.config.train.max_iters:
        close(f"done after step {step}", step)
        return exits.DONE
    saved = f"after step {step}, which is saved" if step else "and rewound to the start"
    resume = "" if run.config.checkpoint.resume else " checkpoint.resume=True"
    close(
        f"stopped by {trainer.stop.reason or 'a signal'} {saved}; the same command with "
        f"--out {run.directory}{resume} goes on from there"
    )
    return exits.STOPPED


def run_with_restarts(run: Run, state: TrainState, trainer: Trainer) -> StepsResult:
    """Train to the end of the run, with a restart at each spike that calls for a rewind, and at
    each corruption."""
    result, corrupted = run_steps(run, state, trainer), []
    while result.spike is not None or result.differ:
        trainer.job.cluster.monitor.heartbeat(f"the restart after step {result.step}", SLOW_PHASE)
        job = trainer.job
        try:
            if result.differ:
                devices = result.differ
                checkpoint, cause = after_corruption(run, job, devices, result.step, corrupted)
            else:
                checkpoint, cause = before_spike(run, job, result.spike, result.step)
        except (NoRewind, DeviceFailed) as why:
            return StepsResult(result.step, failure=str(why))
        with job.report.clock.within("state"):
            run, state = restart_from(checkpoint, cause, run, job)
            jax.block_until_ready(state)
        if result.stopping:
            return StepsResult(run.resume_step or 0, stopping=True)
        result = run_steps(run, state, trainer)
    return result


def run_steps(run: Run, state: TrainState, trainer: Trainer) -> StepsResult:
    """Train from `run.resume_step` until something ends it; then all that was saved is on disk."""
    config, report, checkpoints = run.config, trainer.job.report, trainer.job.checkpoints
    monitor, profile = trainer.job.cluster.monitor, trainer.profile
    buffer, dispatched = MetricsBuffer(config), DispatchLimiter()
    skips = SkipRanges(skip_ranges(config))
    slow_save = max(SLOW_PHASE, 2 * 60 * config.checkpoint.timeout_minutes)  # with the one before
    trainer.loader.batch_sizes = run.batch_sizes  # the run may have gone back to before a change
    todo = range((run.resume_step or 0) + 1, config.train.max_iters + 1)
    batches = trainer.loader.batches(step for step in todo if step not in skips)
    result, unsaved = StepsResult(run.resume_step or 0), 0  # steps, without those that were skipped

    for step in todo:
        monitor.heartbeat(f"the batch of step {step}")
        checkpoints.check()
        metrics = None
        if step not in skips:
            profile.before(step, state)
            with report.clock.within("data"):
                batch = next(batches)
            monitor.heartbeat(f"step {step}")
            lr = learning_rate(config.optimizer, step)
            state, metrics = trainer.train_step(state, np.int32(step), lr, batch)
            with report.timer.waiting_for_device():
                dispatched.add(metrics.loss)
            unsaved += 1
        is_last = step == config.train.max_iters
        stopping = trainer.stop.reached(next(trainer.ticks))
        evaluating = should_evaluate(config, step)
        saving = checkpoints.is_due(step) or is_last or stopping

        report.gather_host_times(step)
        with report.timer.waiting_for_device():
            known = buffer.read(step, metrics, everything=evaluating or saving)
        report.step(step, metrics, known)
        profile.after(step, state)
        spike, failure = buffer.calls_for_rewind(known), buffer.failure(known)
        # Not the same state once more: it would take the place of one that may be better.
        saving |= bool(failure) and unsaved > int(known[-1].metrics.detection.nonfinite)
        differ = () if spike else find_corruption(run, trainer, step, state, saving)
        if spike or differ:
            result = StepsResult(step, stopping, spike, differ)
            break

        if saving:
            monitor.heartbeat(f"the checkpoint of step {step}", slow_save)
            save_checkpoint(run, trainer, step, state)
            unsaved = 0

        # Once the state is safe. A run that is stopped may have no time for it: the next start has.
        if evaluating and (is_last or not stopping):
            evaluate_and_sample(trainer, step, state)
        report.progress(step)
        if is_last or stopping or failure:
            result = StepsResult(step, stopping, failure=failure)
            break

    monitor.heartbeat("the end of the steps", slow_save)
    profile.close(state)
    batches.close()
    with report.clock.within("save"):
        checkpoints.close(is_final=result.spike is None and not result.differ)
    return result


def find_corruption(
    run: Run, trainer: Trainer, step: int, state: TrainState, saving: bool
) -> tuple[int, ...]:
    """Return devices whose parameters differ from their copies, if a comparison is due."""
    every = run.config.train.verify_interval
    if not every or not (saving or should_run_every(step, every)):
        return ()
    trainer.job.cluster.monitor.heartbeat(f"the comparison of devices after step {step}")
    return tuple(devices_that_differ(state.params))


def evaluate_and_sample(
    trainer: Trainer, step: int, state: TrainState, at: Sequence[str] = EVAL_RECORDS
) -> None:
    """Evaluate and write a sample after a step, or only the kinds of records in `at`."""
    jax.block_until_ready(state)  # the steps under way count as steps
    with trainer.job.report.clock.within("evaluation"):
        if "eval" in at:
            trainer.job.cluster.monitor.heartbeat(f"the evaluation after step {step}")
            trainer.job.report.log(trainer.evaluate(step, state.params))
        if "sample" in at:
            trainer.job.cluster.monitor.heartbeat(f"the sample after step {step}")
            trainer.job.report.log(trainer.sample(step, state.params))


def save_checkpoint(run: Run, trainer: Trainer, step: int, state: TrainState) -> None:
    """Start writing the checkpoint of a step; the state may be donated when this returns."""
    jax.block_until_ready(state)  # the steps under way count as steps
    with trainer.job.report.clock.within("save"):
        meta = {
            **run.checkpoint_meta(trainer.loader, step),
            "mesh": describe(trainer.job.steps.mesh),
            "processes": trainer.job.cluster.size,
            "jax": jax.__version__,
            **checkpoint_json(state),
        }
        trainer.job.checkpoints.save(step, checkpoint_tree(state), meta)
