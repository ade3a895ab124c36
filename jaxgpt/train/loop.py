"""A run from its first step to its last: `run_steps` is what happens."""

import contextlib
import dataclasses
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxgpt import __version__
from jaxgpt.checkpoint.checkpointer import Checkpoints
from jaxgpt.cluster import shutdown as exits
from jaxgpt.cluster.preemption import StopSignal
from jaxgpt.cluster.process_group import ProcessGroup
from jaxgpt.cluster.watchdog import Watchdog
from jaxgpt.config import UsageError, should_evaluate, should_run_every, skip_ranges
from jaxgpt.parallel.mesh import describe
from jaxgpt.perf.startup import Startup
from jaxgpt.runtime.dispatch import DispatchLimiter
from jaxgpt.runtime.initialize import end_job
from jaxgpt.spikes.policy import rewind
from jaxgpt.spikes.skip import SkipRanges
from jaxgpt.tracking.records import CheckpointRecord
from jaxgpt.train.reporting.metrics import MetricsBuffer, StepMetrics
from jaxgpt.train.resume import EVAL_RECORDS
from jaxgpt.train.run_directory import Run
from jaxgpt.train.setup import Trainer, begin, set_up
from jaxgpt.train.state import TrainState, checkpoint_json, checkpoint_tree


class StepsResult(NamedTuple):
    """How a stretch of steps ended."""

    step: int
    stopping: bool = False  # whether a signal or the time limit did it
    spike: StepMetrics | None = None  # what calls for a rewind
    failure: str = ""  # why the run cannot go on


def train(
    run: Run, cluster: ProcessGroup, facts: dict[str, Any], stop: StopSignal, startup: Startup
) -> int:
    """Train until train.max_iters, or until `stop` says so; return the exit status.

    It is `exits.DONE`; `exits.STOPPED` with a checkpoint saved; or `exits.FAILED` if spikes or
    steps that are not finite cannot be got over. `facts` are what `initialize_jax` returned.
    """
    minutes = run.config.train.hang_timeout
    with contextlib.closing(Watchdog(minutes, run.directory, cluster.rank, end_job)) as watchdog:
        checkpoints = Checkpoints(run.directory, run.config)
        ready = set_up(run, cluster, facts, stop, startup, watchdog, checkpoints)
        if ready is None:
            return exits.DONE
        run, trainer, state = ready
        trainer.report.start(trainer.loader)
        try:
            if run.missing_records:
                evaluate_and_sample(trainer, run.resume_step or 0, state, run.missing_records)
                startup.mark("evaluation")
            result = run_with_rewinds(run, state, trainer)
        except UsageError:  # data has gone; what is being saved is not to go, too
            if cluster.size == 1:  # other processes would not come to finish it together
                trainer.checkpoints.close()
            raise
        return close_run(run, trainer, result)


def close_run(run: Run, trainer: Trainer, result: StepsResult) -> int:
    """Say how a run ended, close its logs, and return its exit status."""
    step, close = result.step, trainer.report.close
    if result.failure:
        close(result.failure, with_losses=False)
        return exits.FAILED
    if step == run.config.train.max_iters:
        close(f"done after step {step}")
        return exits.DONE
    saved = f"after step {step}, which is saved" if step else "and rewound to the start"
    resume = "" if run.config.checkpoint.resume else " checkpoint.resume=True"
    close(
        f"stopped by {trainer.stop.reason or 'a signal'} {saved}; the same command with "
        f"--out {run.directory}{resume} goes on from there"
    )
    return exits.STOPPED


def run_with_rewinds(run: Run, state: TrainState, trainer: Trainer) -> StepsResult:
    """Train to the end of the run, going back to a checkpoint whenever a spike calls for it."""
    report, cluster = trainer.report, trainer.cluster
    result = run_steps(run, state, trainer)
    while result.spike is not None:
        trainer.watchdog.heartbeat(f"the rewind from step {result.step}")
        spike = report.spike_record(result.spike).to_dict()
        found = rewind(run.config, run.directory, cluster, spike, result.step)
        if found.problem:
            report.show_spikes()
            return StepsResult(result.step, failure=found.problem)
        run = dataclasses.replace(
            run,
            config=run.config.replace(train_range_to_skip=tuple(found.skip)),
            resume_step=found.step,
            resume_meta=found.meta,
        )
        report.rewind(run)
        if result.stopping:
            return StepsResult(run.resume_step or 0, stopping=True)
        with report.timer.excluded(()):
            run, state = begin(run, trainer.steps, trainer.checkpoints, cluster, report)
            jax.block_until_ready(state)
        result = run_steps(run, state, trainer)
    return result


def run_steps(run: Run, state: TrainState, trainer: Trainer) -> StepsResult:
    """Train from `run.resume_step` until something ends it; then all that was saved is on disk."""
    config, report = run.config, trainer.report
    checkpoints, watchdog, profile = trainer.checkpoints, trainer.watchdog, trainer.profile
    buffer, dispatched = MetricsBuffer(config), DispatchLimiter()
    skips = SkipRanges(skip_ranges(config))
    todo = range((run.resume_step or 0) + 1, config.train.max_iters + 1)
    batches = trainer.loader.batches(step for step in todo if step not in skips)
    result = StepsResult(run.resume_step or 0)
    unsaved = 0  # steps, without those that were skipped

    for step in todo:
        watchdog.heartbeat(f"step {step}")
        checkpoints.check()
        metrics = None
        if step not in skips:
            profile.before(step, state)
            with report.timer.waiting("data"):
                batch = next(batches)
            state, metrics = trainer.train_step(state, np.int32(step), batch)
            with report.timer.waiting("device"):
                dispatched.add(metrics.loss)
            unsaved += 1
        is_last = step == config.train.max_iters
        stopping = trainer.stop.reached(next(trainer.ticks))
        evaluating = should_evaluate(config, step)
        saving = is_last or stopping or should_run_every(step, config.checkpoint.interval)

        report.gather_host_times(step)
        with report.timer.waiting("device"):
            known = buffer.read(step, metrics, everything=evaluating or saving)
        report.step(step, metrics, known)
        profile.after(step, state)
        spike = buffer.calls_for_rewind(known)
        if spike is not None:
            result = StepsResult(step, stopping, spike)
            break
        failure = buffer.failure(known)

        # Not the same state once more: it would take the place of one that may be better.
        if saving or (failure and unsaved > known[-1].metrics.detection.nonfinite):
            watchdog.heartbeat(f"the checkpoint of step {step}")
            save_checkpoint(run, trainer, step, state)
            unsaved = 0

        # Once the state is safe. A run that is stopped may have no time for it: the next start has.
        if evaluating and (is_last or not stopping):
            evaluate_and_sample(trainer, step, state)
        report.progress(step)
        if is_last or stopping or failure:
            result = StepsResult(step, stopping, failure=failure)
            break

    profile.close(state)
    batches.close()
    checkpoints.close()
    return result


def evaluate_and_sample(
    trainer: Trainer, step: int, state: TrainState, at: Sequence[str] = EVAL_RECORDS
) -> None:
    """Evaluate and write a sample after a step, or only the kinds of records in `at`."""
    with trainer.report.timer.excluded(state):
        if "eval" in at:
            trainer.watchdog.heartbeat(f"the evaluation after step {step}")
            trainer.report.log(trainer.evaluate(step, state.params))
        if "sample" in at:
            trainer.watchdog.heartbeat(f"the sample after step {step}")
            trainer.report.log(trainer.sample(step, state.params))


def save_checkpoint(run: Run, trainer: Trainer, step: int, state: TrainState) -> None:
    """Start writing the checkpoint of a step; the state may be donated when this returns."""
    with trainer.report.timer.excluded(state):
        began = time.perf_counter()
        meta = {
            "step": step,
            "consumed_tokens": run.consumed_tokens(step),
            "corpus_tokens": run.corpus_tokens(trainer.loader, step),
            "mesh": describe(trainer.steps.mesh),
            "processes": trainer.cluster.size,
            "data_fingerprint": run.fingerprints,
            "tokenizer": run.dataset.tokenizer_meta,
            "config": run.config.to_dict(),
            "jaxgpt": __version__,
            "jax": jax.__version__,
            **checkpoint_json(state),
        }
        trainer.checkpoints.save(step, checkpoint_tree(state), meta)
        path, seconds = f"{run.directory}/checkpoints/{step}", time.perf_counter() - began
        trainer.report.log(CheckpointRecord(step=step, path=path, seconds=seconds))
