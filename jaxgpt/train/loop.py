"""A run from its first step to its last: `run_steps` is what happens."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxgpt.checkpoint.checkpointer import Checkpoints
from jaxgpt.cluster import shutdown as exits
from jaxgpt.cluster.health.preemption import StopSignal
from jaxgpt.cluster.health.watchdog import START_MINUTES, Watchdog
from jaxgpt.cluster.process_group import ProcessGroup
from jaxgpt.config import UsageError, should_evaluate, skip_ranges
from jaxgpt.optim.schedule import learning_rate
from jaxgpt.parallel.mesh import describe
from jaxgpt.perf.startup import Startup
from jaxgpt.runtime.dispatch import DispatchLimiter
from jaxgpt.spikes.skip import SkipRanges
from jaxgpt.train.reporting.goodput import Goodput
from jaxgpt.train.reporting.metrics import MetricsBuffer, StepMetrics
from jaxgpt.train.rewind import find_corruption, go_back_before_spike, go_back_to_agreed
from jaxgpt.train.run.directory import Run
from jaxgpt.train.run.resume import EVAL_RECORDS
from jaxgpt.train.setup import Trainer, begin, set_up
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
    startup: Startup,
    watchdog: Watchdog,
    goodput: Goodput,
) -> int:
    """Train until train.max_iters, or until `stop` says so; return the exit status.

    It is `exits.DONE`; `exits.STOPPED` with a checkpoint saved; or `exits.FAILED` if spikes or
    steps that are not finite cannot be got over. `facts` are what `initialize_jax` returned.
    """
    checkpoints = Checkpoints(run.directory, run.config, stop.allow_for_save)
    ready = set_up(run, cluster, facts, stop, startup, watchdog, checkpoints, goodput)
    if ready is None:
        return exits.DONE
    run, trainer, state = ready
    trainer.report.start(trainer.loader, watchdog.peers)
    try:
        if run.missing_records:
            evaluate_and_sample(trainer, run.resume_step or 0, state, run.missing_records)
            startup.mark("evaluation")
        result = run_with_rewinds(run, state, trainer)
    except UsageError:  # the data has gone: finish the checkpoint that is being saved
        if cluster.size == 1:  # it takes all processes, and the others may not come
            trainer.checkpoints.close(is_final=False)
        raise
    return close_run(run, trainer, result)


def close_run(run: Run, trainer: Trainer, result: StepsResult) -> int:
    """Say how a run ended, close its logs, and return its exit status."""
    step, close = result.step, trainer.report.close
    if result.failure:
        close(result.failure)
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


def run_with_rewinds(run: Run, state: TrainState, trainer: Trainer) -> StepsResult:
    """Train to the end of the run, going back to a checkpoint whenever something calls for it."""
    result, corrupted = run_steps(run, state, trainer), []
    while result.spike is not None or result.differ:
        trainer.watchdog.heartbeat(f"the way back from step {result.step}", START_MINUTES)
        if result.differ:
            run, problem = go_back_to_agreed(run, trainer, result.differ, result.step, corrupted)
        else:
            run, problem = go_back_before_spike(run, trainer, result.spike, result.step)
        if problem:
            return StepsResult(result.step, failure=problem)
        if result.stopping:
            return StepsResult(run.resume_step or 0, stopping=True)
        with trainer.report.timer.excluded((), "restore"):
            run, state = begin(
                run, trainer.steps, trainer.checkpoints, trainer.cluster, trainer.report
            )
            jax.block_until_ready(state)
        result = run_steps(run, state, trainer)
    return result


def run_steps(run: Run, state: TrainState, trainer: Trainer) -> StepsResult:
    """Train from `run.resume_step` until something ends it; then all that was saved is on disk."""
    config, report = run.config, trainer.report
    checkpoints, watchdog, profile = trainer.checkpoints, trainer.watchdog, trainer.profile
    buffer, dispatched = MetricsBuffer(config), DispatchLimiter()
    skips = SkipRanges(skip_ranges(config))
    trainer.loader.batch_sizes = run.batch_sizes  # the run may have gone back to before a change
    todo = range((run.resume_step or 0) + 1, config.train.max_iters + 1)
    batches = trainer.loader.batches(step for step in todo if step not in skips)
    result, unsaved = StepsResult(run.resume_step or 0), 0  # steps, without those that were skipped

    for step in todo:
        watchdog.heartbeat(f"the batch of step {step}")
        checkpoints.check()
        metrics = None
        if step not in skips:
            profile.before(step, state)
            with report.timer.waiting("data"):
                batch = next(batches)
            watchdog.heartbeat(f"step {step}")
            lr = learning_rate(config.optimizer, step)
            state, metrics = trainer.train_step(state, np.int32(step), lr, batch)
            with report.timer.waiting("device"):
                dispatched.add(metrics.loss)
            unsaved += 1
        is_last = step == config.train.max_iters
        stopping = trainer.stop.reached(next(trainer.ticks))
        evaluating = should_evaluate(config, step)
        saving = checkpoints.is_due(step) or is_last or stopping

        report.gather_host_times(step)
        with report.timer.waiting("device"):
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
            watchdog.heartbeat(f"the checkpoint of step {step}", START_MINUTES)
            save_checkpoint(run, trainer, step, state)
            unsaved = 0

        # Once the state is safe. A run that is stopped may have no time for it: the next start has.
        if evaluating and (is_last or not stopping):
            evaluate_and_sample(trainer, step, state)
        report.progress(step)
        if is_last or stopping or failure:
            result = StepsResult(step, stopping, failure=failure)
            break

    watchdog.heartbeat("the end of the steps", START_MINUTES)
    profile.close(state)
    batches.close()
    with report.goodput.within("save"):
        checkpoints.close(is_final=result.spike is None and not result.differ)
    return result


def evaluate_and_sample(
    trainer: Trainer, step: int, state: TrainState, at: Sequence[str] = EVAL_RECORDS
) -> None:
    """Evaluate and write a sample after a step, or only the kinds of records in `at`."""
    with trainer.report.timer.excluded(state, "evaluation"):
        if "eval" in at:
            trainer.watchdog.heartbeat(f"the evaluation after step {step}")
            trainer.report.log(trainer.evaluate(step, state.params))
        if "sample" in at:
            trainer.watchdog.heartbeat(f"the sample after step {step}")
            trainer.report.log(trainer.sample(step, state.params))


def save_checkpoint(run: Run, trainer: Trainer, step: int, state: TrainState) -> None:
    """Start writing the checkpoint of a step; the state may be donated when this returns."""
    with trainer.report.timer.excluded(state, "save"):
        meta = {
            **run.checkpoint_meta(trainer.loader, step),
            "mesh": describe(trainer.steps.mesh),
            "processes": trainer.cluster.size,
            "jax": jax.__version__,
            **checkpoint_json(state),
        }
        trainer.checkpoints.save(step, checkpoint_tree(state), meta)
