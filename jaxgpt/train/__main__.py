"""Train a GPT: `python -m jaxgpt.train [--config NAME] [--mesh D,F,T] [section.key=value ...]`.

Under `mpiexec -n N` the N processes are one job. With no argument a small GPT is trained on the
source of Python's standard library. `--help` lists every key.
"""

import contextlib
import functools
import gc
import sys
from typing import Any

from jaxgpt.cluster.environment import rank_from_env
from jaxgpt.cluster.health.heartbeat import Heartbeats
from jaxgpt.cluster.health.preemption import StopSignal
from jaxgpt.cluster.health.walltime import time_limit
from jaxgpt.cluster.health.watchdog import START_MINUTES, Watchdog
from jaxgpt.cluster.process_group import INIT_TIMEOUT, catch_usage_error, join_process_group
from jaxgpt.cluster.shutdown import job_exit_handler
from jaxgpt.config import Config, is_help, mesh_shape, parse_args
from jaxgpt.optim import CHOICES
from jaxgpt.perf.clock import Clock
from jaxgpt.runtime.compile_cache import use_compile_cache
from jaxgpt.runtime.initialize import end_job, initialize_jax, preemption_sync_point
from jaxgpt.runtime.jax_internals import failure_board
from jaxgpt.tracking.jsonl import METRICS, read_records
from jaxgpt.train.run.directory import Run, prepare_run
from jaxgpt.train.run.resume import initial_model, saved_settings

START_SECONDS = 45.0  # in which processes that nothing stops begin within each other


def main(argv: list[str] | None = None) -> None:
    clock = Clock()
    argv = sys.argv[1:] if argv is None else argv
    parse = functools.partial(
        parse_args, initial_model=initial_model, saved_settings=saved_settings, choices=CHOICES
    )
    with job_exit_handler(failure_board):
        if is_help(argv):  # before MPI, and once
            if rank_from_env() == 0:
                parse(argv)
            return
        config, error = catch_usage_error(parse, argv)
        clock.enter("distributed init")
        minutes = config.train.hang_timeout if config else None
        heartbeats = Heartbeats(minutes, end_job)
        cluster = join_process_group(arrival_seconds(config), on_arrival=heartbeats.connect)
        cluster.raise_if_any(error)
        clock.enter("prepare")
        run = prepare_run(config, cluster)
        limit = None
        if cluster.is_main:
            limit = time_limit(config.train.time_limit, clock.elapsed())
        stop = StopSignal(limit, preemption_sync_point, end_job)
        for record in earlier_saves(run) if cluster.is_main else ():
            stop.allow_for_save(record["seconds"])
        watchdog = Watchdog(minutes, run.directory, cluster.rank, end_job, heartbeats)
        with contextlib.closing(watchdog):
            watchdog.heartbeat("the start of JAX and of its devices", START_MINUTES)
            facts = initialize_jax(cluster, mesh_shape(run.config), clock.enter, preemption=True)
            facts["notes"] += [use_compile_cache(config.compile_cache, cluster), stop.describe()]
            clock.enter("imports")
            from jaxgpt.train.loop import train  # imports JAX: after initialize_jax

            with cluster.name_lost_peers():
                status = train(run, cluster, facts, stop, clock, watchdog)
        gc.freeze()  # the last collection takes 0.4 to 1.3 s (2026-11, two busy cores, JAX 0.10.2)
    sys.exit(status)


def earlier_saves(run: Run) -> list[dict[str, Any]]:
    """Return the records of the last checkpoints of earlier starts."""
    metrics = run.directory / METRICS
    return read_records(metrics, "checkpoint")[-3:] if metrics.exists() else []


def arrival_seconds(config: Config | None) -> float:
    """Return the seconds in which all processes are to come; None is a config that does not fit."""
    if config is None or config.train.hang_timeout is None:
        return config.init_timeout if config else INIT_TIMEOUT
    return min(config.init_timeout, 60 * config.train.hang_timeout + START_SECONDS)


if __name__ == "__main__":
    main()
