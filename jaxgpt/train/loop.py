"""A run from its first step to its last: `train` prepares it, `run_steps` is what happens."""

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxgpt import __version__
from jaxgpt.checkpoint.checkpointer import Checkpoints
from jaxgpt.cluster import shutdown as exits
from jaxgpt.cluster.preemption import StopSignal
from jaxgpt.cluster.process_group import ProcessGroup
from jaxgpt.cluster.watchdog import Watchdog
from jaxgpt.config import (
    UsageError,
    check_batch,
    mesh_sizes,
    should_evaluate,
    should_run_every,
    skip_ranges,
)
from jaxgpt.data.loader import Loader
from jaxgpt.parallel.mesh import crossing, describe, make_mesh
from jaxgpt.perf.profile import StepProfile
from jaxgpt.perf.startup import Startup
from jaxgpt.runtime.compile_cache import CacheUse
from jaxgpt.runtime.dispatch import DispatchLimiter
from jaxgpt.runtime.initialize import end_job
from jaxgpt.spikes.rewind import rewind
from jaxgpt.spikes.skip import SkipRanges, check_faults
from jaxgpt.train.evaluate import Evaluation, Sampler
from jaxgpt.train.metrics import MetricsBuffer, StepMetrics
from jaxgpt.train.reporter import Reporter
from jaxgpt.train.run_directory import EVAL_RECORDS, Run
from jaxgpt.train.state import (
    StepFunctions,
    TrainState,
    checkpoint_json,
    checkpoint_tree,
    state_from_checkpoint,
)
from jaxgpt.train.step import make_steps
from jaxgpt.train.step_metrics import Metrics

START_MINUTES = 30  # that restoring and compiling may take, if train.hang_timeout is less


class Parts(NamedTuple):
    """What steps are run with, from the first to the last, however often they go back."""

    cluster: ProcessGroup
    mesh: Mesh
    train_step: Callable[[TrainState, np.int32, jax.Array], tuple[TrainState, Metrics]]
    loader: Loader
    evaluate: Evaluation
    sample: Sampler
    checkpoints: Checkpoints
    report: Reporter
    stop: StopSignal
    watchdog: Watchdog
    profile: StepProfile
    ticks: Iterator[int]
    """Counts the steps that were begun: unlike the number of a step, it never goes back."""


class End(NamedTuple):
    """How a stretch of steps ended."""

    step: int
    stopping: bool = False
    """Whether a signal or the time limit did it."""
    spike: StepMetrics | None = None
    """What calls for a rewind."""
    failure: str = ""
    """Why the run cannot go on."""


def train(
    run: Run,
    cluster: ProcessGroup,
    facts: dict[str, Any],
    stop: StopSignal,
    startup: Startup,
) -> int:
    """Trains until train.max_iters, or until `stop` says so.

    Args:
        facts: what `initialize_jax` returned.

    Returns:
        An exit status: `exits.DONE`; `exits.STOPPED` with a checkpoint saved; `exits.FAILED` if
        spikes or steps that are not finite cannot be got over.
    """
    minutes = run.config.train.hang_timeout
    with contextlib.closing(Watchdog(minutes, run.directory, cluster.rank, end_job)) as watchdog:
        return train_watched(run, cluster, facts, stop, startup, watchdog)


def train_watched(
    run: Run,
    cluster: ProcessGroup,
    facts: dict[str, Any],
    stop: StopSignal,
    startup: Startup,
    watchdog: Watchdog,
) -> int:
    """`train`, with something that ends the job if it hangs."""
    config = run.config
    sizes = mesh_sizes(config, jax.device_count())
    check_batch(config, sizes)
    check_faults(config, jax.device_count())
    mesh = make_mesh(sizes, cluster.hosts)
    cache_use = CacheUse()
    steps = make_steps(config, mesh)
    report = Reporter(run, steps, startup, cluster)
    report.log_header(facts, warnings=(*steps.warnings, *crossing(mesh, cluster.hosts)))

    is_done = (run.resume_step or 0) >= config.train.max_iters
    if is_done and not run.missing_records:
        report.close(
            f"nothing to do: step {run.resume_step} is saved, "
            f"train.max_iters={config.train.max_iters}"
        )
        return exits.DONE
    checkpoints = Checkpoints(run.directory, config)
    if not is_done:
        checkpoints.check_room(run.resume_step or 0, checkpoint_tree(steps.state_shapes))
    watchdog.heartbeat("the state to begin with", START_MINUTES)
    state = state_to_begin_with(run, steps, checkpoints, cluster)
    if run.resume_step is not None:
        report.info(
            f"resumed from step {run.resume_step}: mesh {run.resume_meta['mesh']} on "
            f"{run.resume_meta['processes']} processes -> {describe(mesh)} on {cluster.size}"
        )
    startup.mark("state")

    watchdog.heartbeat("the compilation of the step", START_MINUTES)
    loader = Loader.for_training(run.dataset, config, steps.batch_shape.sharding)
    train_step = steps.lower_train_step().compile()
    cluster.barrier()
    startup.compile_cache = str(cache_use)
    startup.mark("compile")

    parts = Parts(
        cluster=cluster,
        mesh=mesh,
        train_step=train_step,
        loader=loader,
        evaluate=Evaluation(run.dataset, config, steps, watchdog.heartbeat),
        sample=Sampler(run.dataset, config, steps),
        checkpoints=checkpoints,
        report=report,
        stop=stop,
        watchdog=watchdog,
        profile=StepProfile(run, cluster, train_step, report),
        ticks=itertools.count((run.resume_step or 0) + 1),
    )
    report.start(loader)
    try:
        if run.missing_records:
            look(parts, run.resume_step or 0, state, run.missing_records)
            startup.mark("evaluation")
        end = run_with_rewinds(run, state, steps, parts)
    except UsageError:  # data has gone; what is being saved is not to go, too
        if cluster.size == 1:  # other processes would not come to finish it together
            checkpoints.close()
        raise
    if end.failure:
        report.close(end.failure, with_losses=False)
        return exits.FAILED
    if end.step < config.train.max_iters:
        saved = f"after step {end.step}, which is saved" if end.step else "and rewound to the start"
        report.close(
            f"stopped by {stop.reason or 'a signal'} {saved}; "
            f"the same command with --out {run.directory}"
            f"{'' if config.checkpoint.resume else ' checkpoint.resume=True'} goes on from there"
        )
        return exits.STOPPED
    report.close(f"done after step {end.step}")
    return exits.DONE


def state_to_begin_with(
    run: Run, steps: StepFunctions, checkpoints: Checkpoints, cluster: ProcessGroup
) -> TrainState:
    """The state after `run.resume_step`; without one, the initial state."""
    if run.resume_step is not None:
        shapes = steps.state_shapes
        found = checkpoints.restore(run.resume_step, checkpoint_tree(shapes))
        return state_from_checkpoint(*found, shapes)
    init = steps.init.lower().compile()
    cluster.barrier()
    return init()


def run_with_rewinds(run: Run, state: TrainState, steps: StepFunctions, parts: Parts) -> End:
    """Trains to the end of the run, going back whenever a spike calls for it."""
    report, cluster = parts.report, parts.cluster
    end = run_steps(run, state, parts)
    while end.spike is not None:
        parts.watchdog.heartbeat(f"the rewind from step {end.step}")
        spike = report.spike(end.spike)
        found = rewind(run.config, run.directory, cluster, spike, end.step)
        if found.problem:
            report.show_spikes()
            return End(end.step, failure=found.problem)
        config = run.config.replace(train_range_to_skip=tuple(found.skip))
        run = dataclasses.replace(
            run, config=config, resume_step=found.step, resume_meta=found.meta
        )
        report.rewind(run)
        if end.stopping:
            return End(run.resume_step or 0, stopping=True)
        with report.between_steps(()):
            state = state_to_begin_with(run, steps, parts.checkpoints, cluster)
            jax.block_until_ready(state)
        end = run_steps(run, state, parts)
    return end


def run_steps(run: Run, state: TrainState, parts: Parts) -> End:
    """Trains from `run.resume_step` on until something ends it. All that was saved is on disk."""
    config, report = run.config, parts.report
    checkpoints, watchdog, profile = parts.checkpoints, parts.watchdog, parts.profile
    monitor, in_flight = MetricsBuffer(config), DispatchLimiter()
    skips = SkipRanges(skip_ranges(config))
    todo = range((run.resume_step or 0) + 1, config.train.max_iters + 1)
    batches = parts.loader.batches(step for step in todo if step not in skips)
    end = End(run.resume_step or 0)
    unsaved = 0  # steps, without those that were skipped

    for step in todo:
        watchdog.heartbeat(f"step {step}")
        checkpoints.check()
        metrics = None
        if step not in skips:
            profile.before(step, state)
            with report.waiting("data"):
                batch = next(batches)
            state, metrics = parts.train_step(state, np.int32(step), batch)
            with report.waiting("device"):
                in_flight.add(metrics.loss)
            unsaved += 1
        is_last, stopping = step == config.train.max_iters, parts.stop.reached(next(parts.ticks))
        evaluating = should_evaluate(config, step)
        saving = is_last or stopping or should_run_every(step, config.checkpoint.interval)

        report.gather_host_times(step)
        with report.waiting("device"):
            known = monitor.read(step, metrics, everything=evaluating or saving)
        report.step(step, metrics, known)
        profile.after(step, state)
        spike = monitor.calls_for_rewind(known)
        if spike is not None:
            end = End(step, stopping, spike)
            break
        failure = monitor.failure(known)

        # Not the same state once more: it would take the place of one that may be better.
        if saving or (failure and unsaved > known[-1].metrics.detection.nonfinite):
            watchdog.heartbeat(f"the checkpoint of step {step}")
            with report.between_steps(state):
                began = time.perf_counter()
                meta = {**checkpoint_meta(run, parts, step), **checkpoint_json(state)}
                checkpoints.save(step, checkpoint_tree(state), meta)
                report.saved(step, time.perf_counter() - began)
            unsaved = 0

        # Once the state is safe. A run that is stopped may have no time for it: the next start has.
        if evaluating and (is_last or not stopping):
            look(parts, step, state)
        report.progress(step)
        if is_last or stopping or failure:
            end = End(step, stopping, failure=failure)
            break

    profile.close(state)
    batches.close()
    checkpoints.close()
    return end


def look(parts: Parts, step: int, state: TrainState, at: Sequence[str] = EVAL_RECORDS) -> None:
    """Logs what is due after a step, or the kinds of records of it that are asked for."""
    with parts.report.between_steps(state):
        if "eval" in at:
            parts.watchdog.heartbeat(f"the evaluation after step {step}")
            parts.report.log(parts.evaluate(step, state.params))
        if "sample" in at:
            parts.watchdog.heartbeat(f"the sample after step {step}")
            parts.report.log(parts.sample(step, state.params))


def checkpoint_meta(run: Run, parts: Parts, step: int) -> dict[str, Any]:
    """What is saved beside the state: enough to go on from it, and to know where it came from."""
    return {
        "step": step,
        "consumed_tokens": run.consumed_tokens(step),
        "corpus_tokens": run.corpus_tokens(parts.loader, step),
        "mesh": describe(parts.mesh),
        "processes": parts.cluster.size,
        "data_fingerprint": run.fingerprints,
        "tokenizer": run.dataset.tokenizer_meta,
        "config": run.config.to_dict(),
        "jaxgpt": __version__,
        "jax": jax.__version__,
    }
