"""A run from its first step to its last: `train` reads as what happens."""

import time
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxgpt import __version__
from jaxgpt.config import check_batch, mesh_sizes, skip_ranges
from jaxgpt.data.loader import Loader
from jaxgpt.distributed import exits
from jaxgpt.distributed.cluster import Cluster
from jaxgpt.distributed.compile_cache import CacheUse
from jaxgpt.distributed.mesh import crossing, describe, make_mesh
from jaxgpt.telemetry.startup import Startup
from jaxgpt.training.checkpoint import Checkpoints
from jaxgpt.training.evaluation import Evaluation, Sampler
from jaxgpt.training.reporting import Reporter
from jaxgpt.training.run_directory import Run
from jaxgpt.training.spikes import SkipRanges
from jaxgpt.training.stored import load_steps


def train(
    run: Run,
    cluster: Cluster,
    facts: dict[str, Any],
    stop: exits.StopSignal,
    startup: Startup,
) -> int:
    """Trains until train.max_iters, or until `stop` says so.

    Args:
        facts: what `cluster.connect` returned.

    Returns:
        An exit status: `exits.DONE`, or `exits.STOPPED` with a checkpoint saved.
    """
    config = run.config
    sizes = mesh_sizes(config, jax.device_count())
    check_batch(config, sizes)
    mesh = make_mesh(sizes, cluster.hosts)
    cache_use = CacheUse()
    steps = load_steps(config, mesh, cluster)
    report = Reporter(run, steps, startup, cluster)
    report.announce(facts, warnings=(*steps.warnings, *crossing(mesh, cluster.hosts)))

    start = run.resume_step or 0
    if start >= config.train.max_iters:
        report.close(
            f"nothing to do: step {start} is saved, train.max_iters={config.train.max_iters}"
        )
        return exits.DONE
    checkpoints = Checkpoints(run.directory, config.checkpoint.keep)
    if run.resume_step is None:
        init = steps.init.lower().compile()
        cluster.wait_for_all()
        state = init()
    else:
        state = checkpoints.restore(start, steps.state_shapes)
        report.say(
            f"resumed from step {start}: mesh {run.resume_meta['mesh']} on "
            f"{run.resume_meta['processes']} processes -> {describe(mesh)} on {cluster.size}"
        )
    startup.mark("state")

    loader = Loader.for_training(run.dataset, config, steps.batch_sharding)
    train_step = steps.train_step.lower(
        steps.state_shapes, np.int32(0), loader.batch_shape
    ).compile()
    cluster.wait_for_all()
    startup.compile_cache = str(cache_use)
    startup.mark("compile")

    evaluate = Evaluation(run.dataset, config, steps)
    sample = Sampler(run.dataset, config, steps)
    skips = SkipRanges(skip_ranges(config))
    todo = range(start + 1, config.train.max_iters + 1)
    batches = loader.batches(step for step in todo if step not in skips)
    step = start
    report.start()

    for step in todo:
        is_last = step == config.train.max_iters
        metrics = None
        if step not in skips:
            state, metrics = train_step(state, np.int32(step), next(batches))
        report.step(step, metrics)

        if is_last or is_due(step, config.train.eval_interval):
            with report.between_steps(state):
                report.log(evaluate(step, state.params))
                report.log(sample(step, state.params))

        stopping = stop.reached(step)
        if is_last or stopping or is_due(step, config.checkpoint.interval):
            with report.between_steps(state):
                began = time.perf_counter()
                checkpoints.save(step, state, checkpoint_meta(run, cluster, mesh, step))
                report.saved(step, time.perf_counter() - began)
        report.progress(step)
        if stopping:
            break

    batches.close()
    checkpoints.close()
    if step < config.train.max_iters:
        report.close(
            f"stopped by {stop.reason or 'a signal'} after step {step}, which is saved; "
            f"the same command with --out {run.directory} goes on from there"
        )
        return exits.STOPPED
    report.close(f"done after step {step}")
    return exits.DONE


def is_due(step: int, interval: int) -> bool:
    """Whether something happens at `step`; never if `interval` is 0."""
    return interval > 0 and step % interval == 0


def checkpoint_meta(run: Run, cluster: Cluster, mesh: Mesh, step: int) -> dict[str, Any]:
    """What is saved beside the state: enough to go on from it, and to know where it came from."""
    return {
        "step": step,
        "consumed_tokens": run.consumed_tokens(step),
        "mesh": describe(mesh),
        "processes": cluster.size,
        "data_fingerprint": run.fingerprints,
        "tokenizer": run.dataset.tokenizer_meta,
        "config": run.config.to_dict(),
        "jaxgpt": __version__,
        "jax": jax.__version__,
    }
