"""Make what a run needs before its first step: mesh, functions, state, data, logs."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxgpt.checkpoint.checkpointer import Checkpoints, restore_params
from jaxgpt.checkpoint.metadata import DamagedCheckpoint, list_checkpoints, read_meta
from jaxgpt.checkpoint.replicas import has_copies
from jaxgpt.cluster.health.preemption import StopSignal
from jaxgpt.cluster.health.watchdog import START_MINUTES, Watchdog
from jaxgpt.cluster.process_group import ProcessGroup
from jaxgpt.config import Config, MeshShape, UsageError
from jaxgpt.data.loader import Loader
from jaxgpt.parallel.mesh import describe, device_hosts, job_mesh, tensor_crosses_hosts_warning
from jaxgpt.parallel.sharding import Params
from jaxgpt.perf.memory import check_memory
from jaxgpt.perf.profile import StepProfile
from jaxgpt.perf.startup import Startup
from jaxgpt.runtime.compile_cache import CacheUse
from jaxgpt.spikes.faults import check_faults, with_bit_flip
from jaxgpt.spikes.policy import finish_rewind
from jaxgpt.tracking.records import DamageRecord, EvalRecord, SampleRecord
from jaxgpt.train.evaluate import make_evaluator, make_sampler
from jaxgpt.train.functions import StepFunctions, make_steps
from jaxgpt.train.reporting.goodput import Goodput
from jaxgpt.train.reporting.reporter import Reporter
from jaxgpt.train.run.directory import Run
from jaxgpt.train.run.going_back import go_back_to_older
from jaxgpt.train.state import TrainState, checkpoint_tree, restore_state
from jaxgpt.train.step import Metrics


class Trainer(NamedTuple):
    """What steps are run with, from the first to the last, however often they go back."""

    cluster: ProcessGroup
    steps: StepFunctions
    train_step: Callable[..., tuple[TrainState, Metrics]]  # `StepFunctions.train_step`, compiled
    loader: Loader
    evaluate: Callable[[int, Params], EvalRecord]
    sample: Callable[[int, Params], SampleRecord | None]
    checkpoints: Checkpoints
    report: Reporter
    stop: StopSignal
    watchdog: Watchdog
    profile: StepProfile
    # Counts steps that were begun, for `StopSignal`: never goes back, as a step's number may, and
    # begins at 1, the tick after which JAX stops a job that was signalled before its first step.
    ticks: Iterator[int]


def set_up(
    run: Run,
    cluster: ProcessGroup,
    facts: dict[str, Any],
    stop: StopSignal,
    startup: Startup,
    watchdog: Watchdog,
    checkpoints: Checkpoints,
    goodput: Goodput,
) -> tuple[Run, Trainer, TrainState] | None:
    """Build what a run needs, and the state to begin with; None if there is nothing left to do.

    The run that is returned goes on from an older checkpoint if the newest was damaged. `facts` are
    what `initialize_jax` returned. Raises `UsageError` if the configuration does not fit the
    devices, or there is no room.
    """
    config = run.config
    mesh = job_mesh(config, cluster.hosts)
    check_memory(config, MeshShape(**mesh.shape), cluster.local_size)
    check_faults(config, mesh.size)
    cache_use, steps = CacheUse(), make_steps(config, mesh)
    check_copies(config, steps)
    report = Reporter(run, steps, startup, cluster, goodput)
    report.log_header(facts, layout_warnings(steps, cluster))
    stop.say, checkpoints.log = report.info, report.log
    if (run.resume_step or 0) < config.train.max_iters:
        checkpoints.open(checkpoint_tree(steps.state_shapes))
    elif not run.missing_records:
        report.close(
            f"nothing to do: step {run.resume_step} is saved, "
            f"train.max_iters={config.train.max_iters}; give more to go on"
        )
        return None

    watchdog.heartbeat("the state to begin with", START_MINUTES)
    run, state = begin(run, steps, checkpoints, cluster, report)
    report.log_resume()
    startup.mark("state")
    watchdog.heartbeat("the compilation of the step", START_MINUTES)
    goodput.enter("compile")
    train_step = steps.lower_train_step().compile()
    cluster.barrier()
    startup.compile_cache = str(cache_use)
    startup.mark("compile")
    trainer = Trainer(
        cluster=cluster,
        steps=steps,
        train_step=with_bit_flip(train_step, config),
        loader=Loader.for_training(run.dataset, config, steps.batch_shape.sharding),
        evaluate=make_evaluator(run.dataset, config, steps, watchdog.heartbeat),
        sample=make_sampler(run.dataset, config, steps),
        checkpoints=checkpoints,
        report=report,
        stop=stop,
        watchdog=watchdog,
        profile=StepProfile(run, cluster, train_step, report),
        ticks=itertools.count(1),
    )
    return run, trainer, state


def layout_warnings(steps: StepFunctions, cluster: ProcessGroup) -> tuple[str, ...]:
    """Return what is legal and slow about a layout."""
    shape, hosts = MeshShape(**steps.mesh.shape), device_hosts(steps.mesh, cluster.hosts)
    return (*steps.warnings, *tensor_crosses_hosts_warning(shape, hosts))


def check_copies(config: Config, steps: StepFunctions) -> None:
    """Raise a UsageError if train.verify_interval has nothing to compare."""
    if config.train.verify_interval and not has_copies(steps.state_shapes.params):
        raise UsageError(
            f"train.verify_interval={config.train.verify_interval}: no device of mesh "
            f"{describe(steps.mesh)} has a copy of most parameters to compare them with; it takes "
            "data > 1 or a parallel.zero_stage below 3"
        )


def begin(
    run: Run,
    steps: StepFunctions,
    checkpoints: Checkpoints,
    cluster: ProcessGroup,
    report: Reporter,
) -> tuple[Run, TrainState]:
    """Return a run and the state that it begins with; damaged checkpoints are set aside.

    A rewind that brought it here is finished: newer checkpoints go.
    """
    while True:
        try:
            with report.goodput.within("restore"):
                state = restore_or_init(run, steps, checkpoints, cluster)
        except DamagedCheckpoint as error:
            run = go_back_to_older(run, cluster, error)
            report.go_back(run, DamageRecord(step=run.resume_step, **run.damaged[-1]))
            continue
        checkpoints.forget_later(run.resume_step)
        if cluster.is_main:
            finish_rewind(run.directory)
        return run, state


def restore_or_init(
    run: Run, steps: StepFunctions, checkpoints: Checkpoints, cluster: ProcessGroup
) -> TrainState:
    """Return the state after `run.resume_step`; without one, the state before the first step."""
    if run.resume_step is not None:
        return restore_state(checkpoints, run.resume_step, steps.state_shapes, cluster)
    if run.init_folder is not None:
        return load_weights(Path(run.init_folder), run.init_step, steps)
    init = steps.init.lower().compile()
    cluster.barrier()
    return init()


def load_weights(folder: Path, step: int, steps: StepFunctions) -> TrainState:
    """Return the initial state with the parameters of a run's checkpoint or of converted weights.

    Of learned positions the first model.block_size are taken.
    """
    if step not in list_checkpoints(folder):
        raise UsageError(
            f"{folder}: the weights of step {step}, which the run began with, are not there any "
            "more; bring them back, as the run goes back to its start"
        )
    meta = read_meta(folder, step)
    shapes = steps.state_shapes.params
    if "position_embedding" in shapes:
        shape = shapes["position_embedding"]["embedding"]
        rows = (meta["config"]["model"]["block_size"], shape.shape[1])
        shape = jax.ShapeDtypeStruct(rows, shape.dtype, sharding=shape.sharding)
        shapes = shapes | {"position_embedding": {"embedding": shape}}
    return steps.init_from(restore_params(folder, step, shapes))
