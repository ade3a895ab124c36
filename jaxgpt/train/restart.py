"""Restarting a run from a checkpoint: to resume, to rewind or to recover from damage."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxgpt.checkpoint.checkpointer import Checkpoints, restore_params
from jaxgpt.checkpoint.metadata import (
    DamagedCheckpoint,
    list_checkpoints,
    newest_undamaged,
    newest_valid,
    quarantine,
    read_meta,
    valid_checkpoints,
)
from jaxgpt.cluster.process_group import ProcessGroup
from jaxgpt.config import UsageError, skip_ranges
from jaxgpt.spikes.policy import (
    NoRewind,
    commit_rewind,
    decide_rewind,
    finish_rewind,
    pending_rewind,
    skipped_by,
    skipped_by_rewinds,
)
from jaxgpt.tracking.records import CorruptionRecord, DamageRecord, Record
from jaxgpt.train.jitted import JittedFunctions
from jaxgpt.train.reporting.metrics import StepMetrics
from jaxgpt.train.reporting.reporter import Reporter
from jaxgpt.train.resume import missing_records, ranges_to_skip, resumed_batch_sizes
from jaxgpt.train.run_directory import Run
from jaxgpt.train.state import TrainState, restore_state

MAX_CORRUPTIONS = 3  # limit per checkpoint; more would suggest a faulty device, not bad luck


class DeviceFailed(Exception):
    """Raised to end the run if replicas of the parameters differ repeatedly."""


class Job(NamedTuple):
    """Parts of a run that stay the same across restarts."""

    cluster: ProcessGroup
    steps: JittedFunctions
    checkpoints: Checkpoints
    report: Reporter


class Cause(NamedTuple):
    """The cause of a restart. Both fields are None when a run starts or resumes."""

    rewind: dict[str, Any] | None = None  # the rewind after a loss spike; see `read_rewinds`
    record: Record | None = None  # a record to log after the restart


def restart_from(
    checkpoint: int | None, cause: Cause, run: Run, job: Job
) -> tuple[Run, TrainState]:
    """Restore a run and its state from a checkpoint. Return both.

    If `checkpoint` is None, the run starts before the first step. If the checkpoint's arrays are
    damaged, the run uses the newest earlier checkpoint that is undamaged (unless
    checkpoint.on_damage=refuse). Nothing is renamed or removed until all processes have read the
    checkpoint. After that, damaged checkpoints are quarantined, any rewind is committed, and the
    abandoned checkpoints and records are removed. All processes must call this.

    Raises:
        DamagedCheckpoint: if the checkpoint's arrays are damaged, and either no older checkpoint is
            undamaged or checkpoint.on_damage=refuse. Also raised if the arrays of the initial
            weights are damaged.
        BrokenPipeError: on process 0, if the output pipe is closed.
    """
    damaged = dict(run.damaged)
    while True:
        try:
            run = _as_of(checkpoint, run, job.cluster, cause.rewind)
            state = _read_state(run, job)
            break
        except DamagedCheckpoint as error:
            older = _older_checkpoint(checkpoint, run, job.cluster)
            if older is None:
                raise
            damaged[checkpoint], checkpoint = error.reason, older

    def commit() -> tuple[dict[str, Any] | None, list[dict[str, str]]]:
        rewind = cause.rewind or pending_rewind(run.directory)
        if rewind is None:
            for step in list_checkpoints(run.directory):
                if step > (checkpoint or 0):  # otherwise, the run would continue from this one
                    damaged.setdefault(step, f"the JSON of checkpoint {step} is damaged")
        found = [quarantine(run.directory, s, why) for s, why in sorted(damaged.items())]
        if rewind is not None:
            commit_rewind(run.directory, rewind, checkpoint or 0)
        job.checkpoints.remove_local_after(checkpoint or 0)
        return rewind, found

    rewind, quarantined = job.cluster.run_on_main(commit)
    records: list[Record] = [DamageRecord(step=checkpoint or 0, **one) for one in quarantined]
    if cause.record is not None:
        records.append(dataclasses.replace(cause.record, step=checkpoint or 0))
    run = dataclasses.replace(run, damaged=())
    job.report.restart(run, records)
    if rewind is not None and job.cluster.is_main:
        job.report.log_rewind()
        finish_rewind(run.directory)
    return run, state


def _as_of(
    checkpoint: int | None, run: Run, cluster: ProcessGroup, rewind: dict[str, Any] | None
) -> Run:
    """Return a copy of the run with the checkpoint's JSON, steps to skip and missing records.

    All processes must call this.
    """

    def on_process_0() -> dict[str, Any]:
        meta = {} if checkpoint is None else read_meta(run.directory, checkpoint)
        asked = skip_ranges(run.config.replace(train_range_to_skip=tuple(run.asked_to_skip)))
        sizes = resumed_batch_sizes(checkpoint, meta, run.config)
        rewound = skipped_by_rewinds(run.directory, sizes)
        rewound += [skipped_by(rewind, sizes)] if rewind else []
        skip, _ = ranges_to_skip(asked, rewound, checkpoint, meta)
        return {
            "skip": skip,
            "resume_step": checkpoint,
            "resume_meta": meta,
            "missing_records": missing_records(run.config, run.dataset, checkpoint),
        }

    found = cluster.run_on_main(on_process_0)
    config = run.config.replace(train_range_to_skip=tuple(found.pop("skip")))
    return dataclasses.replace(run, config=config, **found)


def _older_checkpoint(checkpoint: int | None, run: Run, cluster: ProcessGroup) -> int | None:
    """Given a damaged checkpoint, return the newest earlier one with intact JSON.

    Return None if there is no such checkpoint, if `checkpoint` is None, or if
    checkpoint.on_damage=refuse.
    """
    # If `checkpoint` is None, the initial weights are damaged.
    if checkpoint is None or run.config.checkpoint.on_damage == "refuse":
        return None
    return cluster.run_on_main(lambda: newest_valid(run.directory, checkpoint - 1)[0])


def _read_state(run: Run, job: Job) -> TrainState:
    """Return the state after `run.resume_step`, or the initial state if `resume_step` is None.

    Raises `DamagedCheckpoint` on every process if the arrays are damaged.
    """
    if run.resume_step is not None:
        return restore_state(job.checkpoints, run.resume_step, job.steps.state_shapes)
    if run.init_folder is not None:
        return load_weights(Path(run.init_folder), run.init_step, job.steps, job.cluster)
    return initial_state(job.steps, job.cluster)


def initial_state(steps: JittedFunctions, cluster: ProcessGroup) -> TrainState:
    """Return the state before the first step, initialized from train.seed.

    All processes must call this.
    """
    init = steps.init.lower().compile()
    cluster.barrier()
    return init()


def load_weights(
    folder: Path, step: int, steps: JittedFunctions, cluster: ProcessGroup
) -> TrainState:
    """Return the initial state, with parameters from a run's checkpoint or from converted weights.

    `folder` is a run directory or the output of jaxgpt.convert, and `step` selects one of its
    checkpoints. A learned position-embedding table is truncated to its first model.block_size rows.
    All processes must call this.

    Raises:
        DamagedCheckpoint: on every process, if the weight arrays are damaged.
        UsageError: on every process, if the weights are missing.
    """

    def read() -> dict[str, Any]:
        if step not in list_checkpoints(folder):
            raise UsageError(
                f"{folder}: the weights of step {step}, which the run began with, are missing; "
                "restore these files, because the run has to start again from them"
            )
        return read_meta(folder, step)

    meta = cluster.run_on_all(read)
    shapes = steps.state_shapes.params
    if "position_embedding" in shapes:
        shape = shapes["position_embedding"]["embedding"]
        rows = (meta["config"]["model"]["block_size"], shape.shape[1])
        shape = jax.ShapeDtypeStruct(rows, shape.dtype, sharding=shape.sharding)
        shapes = shapes | {"position_embedding": {"embedding": shape}}
    return steps.init_from(restore_params(folder, step, shapes, cluster))


def before_spike(run: Run, job: Job, spike: StepMetrics, last: int) -> tuple[int | None, Cause]:
    """Return the checkpoint to rewind to after a loss spike, and the cause of the restart.

    The checkpoint is None for the state before the first step. `last` is the last completed step.
    All processes must call this. Raises `NoRewind` on every process if the run cannot rewind.
    """
    record = job.report.spike_record(spike)

    def on_process_0() -> list[Any]:
        try:
            saved = list(valid_checkpoints(run.directory))
            found, sizes = record.to_dict(), run.batch_sizes
            return [decide_rewind(run.config, run.directory, saved, found, last, sizes), ""]
        except NoRewind as why:
            return [None, str(why)]

    rewind, problem = job.cluster.run_on_main(on_process_0)
    if problem:
        job.report.show_spikes()
        raise NoRewind(problem)
    return rewind["to"] or None, Cause(rewind=rewind)


def after_corruption(
    run: Run, job: Job, devices: Sequence[int], last: int, earlier: list[int | None]
) -> tuple[int | None, Cause]:
    """Return the checkpoint to restart from after corruption, and the cause of the restart.

    The checkpoint is the newest one with intact JSON, or None for the state before the first step.
    If train.verify_interval is set, checkpoints are saved only if replicas agree. All processes
    must call this.

    Args:
        devices: mesh indices of devices whose parameters differ from those of other replicas.
        last: the step after which the difference was found.
        earlier: the checkpoints that earlier calls returned. This call appends the checkpoint that
            it returns.

    Raises:
        DeviceFailed: on every process, if `earlier` already contains the checkpoint
            `MAX_CORRUPTIONS` times.
        UsageError: on every process, if `newest_undamaged` raises it or `DamagedCheckpoint`.
    """
    on_damage = run.config.checkpoint.on_damage
    checkpoint = job.cluster.run_on_main(lambda: newest_undamaged(run.directory, on_damage)[0])
    names = _device_names(devices, job)
    if earlier.count(checkpoint) == MAX_CORRUPTIONS:
        raise DeviceFailed(
            f"train.verify_interval={run.config.train.verify_interval}: parameters of "
            f"{', '.join(names)} differ from their replicas at step {last}, even after "
            f"{MAX_CORRUPTIONS} restarts from the same checkpoint; exclude the host of each device"
        )
    earlier.append(checkpoint)
    record = CorruptionRecord(step=checkpoint or 0, found=last, devices=names)
    return checkpoint, Cause(record=record)


def _device_names(devices: Sequence[int], job: Job) -> list[str]:
    """Return a description of each device, given its index in the flattened mesh."""
    hosts, flat = job.cluster.host_names, job.steps.mesh.devices.flat
    ranks = [flat[device].process_index for device in devices]
    return [
        f"device {device} of the mesh (process {rank} on host {hosts[rank]})"
        for device, rank in zip(devices, ranks, strict=True)
    ]
