"""The training loop. To see what happens in each step, read `run_steps`."""

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
from jaxgpt.perf.clock import Clock
from jaxgpt.runtime.dispatch import DispatchLimiter
from jaxgpt.spikes.policy import NoRewind
from jaxgpt.spikes.skip import SkipRanges
from jaxgpt.train.reporting.metrics import MetricsBuffer, StepMetrics
from jaxgpt.train.restart import DeviceFailed, after_corruption, before_spike, restart_from
from jaxgpt.train.resume import EVAL_RECORDS
from jaxgpt.train.run_directory import Run
from jaxgpt.train.setup import LoopParts, set_up
from jaxgpt.train.state import TrainState, checkpoint_json, checkpoint_tree


class StepsResult(NamedTuple):
    """Step at which `run_steps` or `run_with_restarts` ended, and the reason."""

    # The last step. If training stopped during a restart, this is the checkpoint's step, or 0 if
    # there is no checkpoint.
    step: int
    stopping: bool = False  # a signal or the time limit stops the run
    spike: StepMetrics | None = None  # the step that calls for a rewind
    corrupted: tuple[int, ...] = ()  # mesh indices of devices; see `devices_that_differ`
    failure: str = ""  # why the run cannot continue


def train(
    run: Run,
    cluster: ProcessGroup,
    facts: dict[str, Any],
    stop: StopSignal,
    clock: Clock,
) -> int:
    """Train until step train.max_iters or until `stop` ends the run; return the exit status.

    The status is `exits.DONE`, `exits.STOPPED` (the run can be resumed) or `exits.FAILED` (the run
    cannot recover from loss spikes, non-finite steps or a faulty device). If no steps are left, it
    is `exits.FAILED` if the run failed at its newest checkpoint. `facts` is the result of
    `initialize_jax`. All processes must call this. On process 0, raises `BrokenPipeError` if the
    output pipe is closed.
    """
    checkpoints = Checkpoints(run.directory, run.config, cluster, stop.allow_for_save)
    ready = set_up(run, cluster, facts, stop, clock, checkpoints)
    if ready is None:
        return exits.FAILED if "failure" in run.resume_meta else exits.DONE
    run, parts, state = ready
    parts.job.report.start(parts.loader)
    try:
        if run.missing_records:
            evaluate_and_sample(parts, run.resume_step or 0, state, run.missing_records)
        result = run_with_restarts(run, state, parts)
    except UsageError:  # for example, because the data has disappeared
        # Finish the save in progress, but only in a single-process run, because `close` is a
        # collective operation that other processes may never join.
        if cluster.size == 1:
            parts.job.checkpoints.close(is_final=False)
        raise
    return _close_run(run, parts, result)


def _close_run(run: Run, parts: LoopParts, result: StepsResult) -> int:
    """Log how the run ended, close its logs, and return its exit status."""
    step, close = result.step, parts.job.report.close
    if result.failure:
        close(f"error: {result.failure}", has_failed=True)
        return exits.FAILED
    if step >= run.config.train.max_iters:
        close(f"done after step {step}", step)
        return exits.DONE
    saved = f"after step {step}, which is saved" if step else "and rewound to the start"
    resume = "" if run.config.checkpoint.resume else " checkpoint.resume=True"
    close(
        f"stopped by {parts.stop.reason or 'a signal'} {saved}; the same command with "
        f"--out {run.directory}{resume} continues from there"
    )
    return exits.STOPPED


def run_with_restarts(run: Run, state: TrainState, parts: LoopParts) -> StepsResult:
    """Train until the run ends or stops; restart it after corruption or a loss spike.

    If the run cannot restart, the result has a `failure`. The caller must not use `state`
    afterwards, because the first step donates it. All processes must call this.
    """
    result, earlier = run_steps(run, state, parts), []
    while result.spike is not None or result.corrupted:
        parts.job.cluster.monitor.heartbeat(f"the restart after step {result.step}", SLOW_PHASE)
        job = parts.job
        try:
            if result.corrupted:
                devices = result.corrupted
                checkpoint, cause = after_corruption(run, job, devices, result.step, earlier)
            else:
                checkpoint, cause = before_spike(run, job, result.spike, result.step)
        except (NoRewind, DeviceFailed) as why:
            return StepsResult(result.step, failure=str(why))
        with job.report.clock.within("state"):
            run, state = restart_from(checkpoint, cause, run, job)
            jax.block_until_ready(state)
        if result.stopping:
            return StepsResult(run.resume_step or 0, stopping=True)
        result = run_steps(run, state, parts)
    return result


def run_steps(run: Run, state: TrainState, parts: LoopParts) -> StepsResult:
    """Train from the step after `run.resume_step` until the run ends, stops, fails or must restart.

    The first step donates `state`, so the caller must not use it afterwards. All saves have
    finished when this returns. All processes must call this. After a failure, errors of saves are
    only logged. On process 0, raises `BrokenPipeError` if the output pipe is closed.
    """
    config, report, checkpoints = run.config, parts.job.report, parts.job.checkpoints
    monitor, profile = parts.job.cluster.monitor, parts.profile
    buffer, dispatched = MetricsBuffer(config), DispatchLimiter()
    skips = SkipRanges(skip_ranges(config))
    # Twice the timeout, because a save first waits for the previous save.
    slow_save = max(SLOW_PHASE, 2 * 60 * config.checkpoint.timeout_minutes)
    parts.loader.batch_sizes = run.batch_sizes  # a rewind may have undone a change of batch size
    todo = range((run.resume_step or 0) + 1, config.train.max_iters + 1)
    batches = parts.loader.batches(step for step in todo if step not in skips)
    # Without steps, the outcome of the run is that of its checkpoint.
    result = StepsResult(run.resume_step or 0, failure=run.resume_meta.get("failure", ""))

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
            state, metrics = parts.train_step(state, np.int32(step), lr, batch)
            with report.timer.waiting_for_device():
                dispatched.add(metrics.loss)
        is_last = step == config.train.max_iters
        stopping = parts.stop.reached(next(parts.ticks))
        evaluating = should_evaluate(config, step)
        saving = checkpoints.is_due(step) or is_last or stopping

        report.gather_host_times(step)
        with report.timer.waiting_for_device():
            known = buffer.read(step, metrics, everything=evaluating or saving)
        report.step(step, metrics, known)
        profile.after(step, state)
        spike, failure = buffer.calls_for_rewind(known), buffer.failure(known)
        if failure and not saving:
            monitor.heartbeat(f"the saves before step {step}", slow_save)
            saving = _has_changed_since_save(parts, step, skips, known[-1])
        corrupted = () if spike else _find_corruption(run, parts, step, state, saving)
        if spike or corrupted:
            result = StepsResult(step, stopping, spike, corrupted)
            break

        if saving:
            monitor.heartbeat(f"the checkpoint of step {step}", slow_save)
            save_checkpoint(run, parts, step, state, failure)

        # Evaluate after the save, when the state is safe. A run that is being stopped may not have
        # time to evaluate, so the resumed run evaluates first.
        if evaluating and (is_last or not stopping):
            evaluate_and_sample(parts, step, state)
        if is_last or stopping or failure:
            result = StepsResult(step, stopping, failure=failure)
            break

    monitor.heartbeat("the end of the steps", slow_save)
    profile.close(state)
    batches.close()
    with report.clock.within("save"):
        try:
            checkpoints.close(is_final=result.spike is None and not result.corrupted)
        except UsageError as error:  # on all processes
            if not result.failure:
                raise
            report.info(f"warning: {error}")  # must not hide the failure
    return result


def _has_changed_since_save(
    parts: LoopParts, step: int, skips: SkipRanges, last: StepMetrics
) -> bool:
    """Wait for all saves, and return whether the state after `step` is in no checkpoint.

    Saving the same state again could evict an older checkpoint, which may be better. Skipped steps
    and the non-finite steps up to `last` leave the state unchanged. If a save has failed and the
    run could not continue without it, this logs the error. All processes must call this.
    """
    newest = None
    with parts.job.report.clock.within("save"):
        try:
            newest = parts.job.checkpoints.newest_complete()
        except UsageError as error:  # on all processes
            parts.job.report.info(f"warning: {error}")
    n_trained = sum(s not in skips for s in range((newest or 0) + 1, step + 1))
    return n_trained > int(last.metrics.detection.nonfinite)


def _find_corruption(
    run: Run, parts: LoopParts, step: int, state: TrainState, saving: bool
) -> tuple[int, ...]:
    """Return the mesh indices of devices whose parameters differ from those of the other replicas.

    If train.verify_interval is set, replicas are compared at this interval and before every save.
    The result is empty if no comparison is due. All processes must call this.
    """
    every = run.config.train.verify_interval
    if not every or not (saving or should_run_every(step, every)):
        return ()
    activity = f"the comparison of devices after step {step}"
    parts.job.cluster.monitor.heartbeat(activity, SLOW_PHASE)  # compiled when it first runs
    return tuple(devices_that_differ(state.params))


def evaluate_and_sample(
    parts: LoopParts, step: int, state: TrainState, kinds: Sequence[str] = EVAL_RECORDS
) -> None:
    """Log an evaluation, a sample or both after a step.

    `kinds` contains "eval", "sample" or both. If samples are disabled or the data has no tokenizer,
    no sample is logged. All processes must call this.

    Raises:
        UsageError: if the data is invalid or cannot be read.
        BrokenPipeError: on process 0, if the output pipe is closed.
    """
    jax.block_until_ready(state)  # so that steps in flight count as step time
    with parts.job.report.clock.within("evaluation"):
        if "eval" in kinds:
            # Each of these is compiled when it first runs.
            parts.job.cluster.monitor.heartbeat(f"the evaluation after step {step}", SLOW_PHASE)
            parts.job.report.log(parts.evaluate(step, state.params))
        if "sample" in kinds:
            parts.job.cluster.monitor.heartbeat(f"the sample after step {step}", SLOW_PHASE)
            parts.job.report.log(parts.sample(step, state.params))


def save_checkpoint(
    run: Run, parts: LoopParts, step: int, state: TrainState, failure: str = ""
) -> None:
    """Start saving a checkpoint of a step; the caller may donate the state after this returns.

    If the run failed at this step, `failure` is the reason, which the checkpoint's JSON then
    contains. All processes must call this. On process 0, raises `BrokenPipeError` if the output
    pipe is closed.
    """
    jax.block_until_ready(state)  # so that steps in flight count as step time
    with parts.job.report.clock.within("save"):
        meta = {
            **run.checkpoint_meta(parts.loader, step),
            **checkpoint_json(state, parts.job.steps.mesh, parts.job.cluster.size),
        } | ({"failure": failure} if failure else {})
        parts.job.checkpoints.save(step, checkpoint_tree(state), meta)
