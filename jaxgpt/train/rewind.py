"""Going back in a run that is under way: before a spike, or to where all devices agreed."""

import dataclasses
from collections.abc import Sequence

from jaxgpt.checkpoint.replicas import devices_that_differ
from jaxgpt.config import should_run_every
from jaxgpt.spikes.policy import rewind
from jaxgpt.tracking.records import CorruptionRecord
from jaxgpt.train.reporting.metrics import StepMetrics
from jaxgpt.train.run.directory import Run
from jaxgpt.train.run.going_back import newest_state
from jaxgpt.train.setup import Trainer
from jaxgpt.train.state import TrainState

MAX_CORRUPTIONS = 3  # from one checkpoint: then the device, not chance, is to blame


def find_corruption(
    run: Run, trainer: Trainer, step: int, state: TrainState, saving: bool
) -> tuple[int, ...]:
    """Return devices whose parameters are not those of their copies, if they are due to compare."""
    every = run.config.train.verify_interval
    if not every or not (saving or should_run_every(step, every)):
        return ()
    trainer.watchdog.heartbeat(f"the comparison of devices after step {step}")
    return tuple(devices_that_differ(state.params))


def go_back_before_spike(
    run: Run, trainer: Trainer, spike: StepMetrics, last: int
) -> tuple[Run, str]:
    """Return the run as of a checkpoint before a spike, or why there can be no rewind.

    `last` is the step that the run has come to.
    """
    record = trainer.report.spike_record(spike).to_dict()
    found = rewind(run.config, run.directory, trainer.cluster, record, last)
    if found.problem:
        trainer.report.show_spikes()
        return run, found.problem
    run = dataclasses.replace(
        run,
        config=run.config.replace(train_range_to_skip=tuple(found.skip)),
        resume_step=found.step,
        resume_meta=found.meta,
    )
    trainer.report.go_back(run)
    trainer.report.log_rewind()
    return run, ""


def go_back_to_agreed(
    run: Run, trainer: Trainer, differ: Sequence[int], last: int, corrupted: list[int | None]
) -> tuple[Run, str]:
    """Return the run as of its newest checkpoint, before which devices were compared.

    `differ` are the devices that were not found equal after the step `last`; `corrupted` the steps
    gone back to until now, which this adds to. After `MAX_CORRUPTIONS` to the same one, the second
    value says so.
    """
    names = device_names(differ, trainer)
    run = newest_state(run, trainer.cluster)
    if corrupted.count(run.resume_step) == MAX_CORRUPTIONS:
        return run, (
            f"train.verify_interval={run.config.train.verify_interval}: {', '.join(names)} differs "
            f"from its copies at step {last}, as in {MAX_CORRUPTIONS} tries before; leave "
            "out its host"
        )
    corrupted.append(run.resume_step)
    record = CorruptionRecord(step=run.resume_step or 0, found=last, devices=names)
    trainer.report.go_back(run, record)
    return run, ""


def device_names(devices: Sequence[int], trainer: Trainer) -> list[str]:
    """Return what to call devices, given by their place in the mesh."""
    hosts, flat = trainer.cluster.host_names, trainer.steps.mesh.devices.flat
    ranks = [flat[device].process_index for device in devices]
    return [
        f"device {device} of the mesh (process {rank} on host {hosts[rank]})"
        for device, rank in zip(devices, ranks, strict=True)
    ]
