"""Train a GPT: `python -m jaxgpt.train [--config NAME] [--mesh D,F,T] [section.key=value ...]`.

Under `mpiexec -n N`, the N processes form one job. Without arguments, the command trains a small
GPT on the source code of Python's standard library. `--help` lists every key.
"""

import functools
import gc
import os
import sys
from typing import Any

from jaxgpt.cluster.environment import rank_from_env
from jaxgpt.cluster.launch_line import launch_prefix
from jaxgpt.cluster.monitor import HangLimit
from jaxgpt.cluster.process_group import (
    INIT_TIMEOUT,
    ProcessGroup,
    catch_usage_error,
    join_process_group,
)
from jaxgpt.cluster.shutdown import job_exit_handler
from jaxgpt.cluster.stopping import StopSignal, time_limit
from jaxgpt.cluster.timeouts import SLOW_PHASE, START_SKEW
from jaxgpt.config import (
    TRAIN,
    Config,
    UsageError,
    describe_batch_size,
    is_help,
    mesh_shape,
    parse_args,
    with_batch_size,
)
from jaxgpt.optim import CHOICES
from jaxgpt.perf.clock import Clock
from jaxgpt.runtime.compile_cache import use_compile_cache
from jaxgpt.runtime.devices import count_devices
from jaxgpt.runtime.initialize import initialize_jax, preemption_sync_point
from jaxgpt.tracking.jsonl import METRICS, read_records
from jaxgpt.train.init_from import initial_model
from jaxgpt.train.resume import saved_settings
from jaxgpt.train.run_directory import Run, prepare_run


def main(argv: list[str] | None = None) -> None:
    clock = Clock()
    argv = sys.argv[1:] if argv is None else argv
    notes: list[str] = []
    parse = functools.partial(
        parse_args,
        initial_model=initial_model,
        saved_settings=saved_settings,
        choices=CHOICES,
        note=notes.append,
        counts_devices_later=True,
    )
    with job_exit_handler():
        if is_help(argv):  # before MPI starts; only rank 0 prints
            if rank_from_env() == 0:
                parse(argv)
            return
        command = f"{launch_prefix(os.environ)}{TRAIN}" if rank_from_env() == 0 else TRAIN
        config, error = catch_usage_error(parse, argv, command)
        clock.enter("distributed init")
        with join_process_group(*_start_limits(config)) as cluster:
            cluster.raise_if_any(error)
            clock.enter("prepare")
            monitor = cluster.monitor
            # Preparation may convert hundreds of gigabytes of weights.
            monitor.heartbeat("the preparation of the run directory", 8 * SLOW_PHASE)
            n_devices = None
            if config.train.batch_size_per_device is not None:
                config, n_devices, text = cluster.run_on_all(_count_batch, config, cluster)
                notes.append(text)
            run = prepare_run(config, cluster)
            monitor.write_stacks_to(run.directory)
            limit = None
            if cluster.is_main:
                limit = time_limit(config.train.time_limit, clock.elapsed())
            stop = StopSignal(monitor, limit, preemption_sync_point)
            for record in _earlier_saves(run) if cluster.is_main else ():
                stop.allow_for_save(record["seconds"])
            monitor.heartbeat("the start of JAX and its devices", SLOW_PHASE)
            facts = initialize_jax(cluster, mesh_shape(run.config), clock.enter, preemption=True)
            if n_devices not in (None, facts["devices"]):
                raise UsageError(
                    f"train.batch_size_per_device: JAX found {facts['devices']} devices instead of "
                    f"{n_devices}; use train.batch_size=N, the batch size of the whole job"
                )
            facts["notes"] += [*notes, use_compile_cache(config.compile_cache, cluster)]
            if cluster.is_main:
                facts["notes"].append(stop.describe())
            clock.enter("imports")
            # This module imports JAX, so it must be imported after initialize_jax.
            from jaxgpt.train.loop import train

            status = train(run, cluster, facts, stop, clock)
        # Skip garbage collection at exit, which takes 0.4 to 1.3 s (2026-11, two busy cores, JAX
        # 0.10.2).
        gc.freeze()
    sys.exit(status)


def _count_batch(config: Config, cluster: ProcessGroup) -> tuple[Config, int, str]:
    """Compute train.batch_size from train.batch_size_per_device.

    Returns the new configuration, the number of devices, and a line for the log. All processes must
    call this.
    """
    n_devices = count_devices(mesh_shape(config), cluster)
    shape = mesh_shape(config, n_devices)
    return with_batch_size(config, shape), n_devices, describe_batch_size(config, shape)


def _earlier_saves(run: Run) -> list[dict[str, Any]]:
    """Return the last three `checkpoint` records in metrics.jsonl, oldest first.

    The list is shorter if there are fewer records, and empty if there is no metrics.jsonl.
    """
    metrics = run.directory / METRICS
    return read_records(metrics, "checkpoint")[-3:] if metrics.exists() else []


def _start_limits(config: Config | None) -> tuple[float, HangLimit | None]:
    """Return how many seconds to wait for all processes to join, and the hang watchdog's limit.

    The limit is None if train.hang_timeout is None. `config` is None if the configuration is
    invalid. The processes join even then, so that all of them exit with the error.
    """
    minutes = config.train.hang_timeout if config else None
    timeout = config.init_timeout if config else INIT_TIMEOUT
    if minutes is None:
        return timeout, None
    limit = HangLimit(60 * minutes, f"train.hang_timeout={minutes:g}")
    return min(timeout, limit.seconds + START_SKEW), limit


if __name__ == "__main__":
    main()
