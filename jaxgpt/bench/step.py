"""Time, rates and memory of training steps.

Each round times the training loop, the compiled step alone (on a single batch) and a large matmul.
All three therefore run under the same machine load.
"""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxgpt.bench.harness import PROG, BenchJob, Result, Value, open_job, spread
from jaxgpt.bench.rounds import Rounds
from jaxgpt.cluster.process_group import ProcessGroup
from jaxgpt.config import parse_args
from jaxgpt.doctor.directory import check_writable
from jaxgpt.perf.flops import Rates, flops_per_token, peak_flops
from jaxgpt.perf.matmul import matmul_rate, matmul_size
from jaxgpt.perf.memory import compiled_bytes, memory_in_use
from jaxgpt.perf.profile import describe
from jaxgpt.train.init_from import initial_model

WARM_UP = 3  # steps
ROUNDS = 7
ROUND_SECONDS = 1.5  # target duration if the number of steps is not set
MAX_STEPS = 500  # per round, if the number of steps is not set
PROFILED = 5  # steps


def run(
    settings: Sequence[str],
    steps: int | None = None,
    synthetic: bool = False,
    profile: Path | None = None,
    rounds: int = ROUNDS,
) -> Result:
    """Time `rounds` rounds of `steps` steps, in the training loop and with the compiled step only.

    If `steps` is None, `steps_per_round` chooses the number of steps. `settings` are command-line
    settings. If `synthetic` is set, random tokens replace the data. If `profile` is set, a trace of
    five more steps is written to that folder.

    Raises `UsageError` if a setting is invalid, or if `profile` is not writable.
    """
    config = parse_args(settings, PROG, initial_model)
    with open_job(config) as job:
        if profile:
            job.cluster.run_on_all(check_writable, profile, "--profile")
        run = Rounds(job, config, synthetic)
        values = {"config": config.config, "data": run.data, **measure(run, job, rounds, steps)}
        if profile:
            found = run.profile(PROFILED, profile)
            values["profile"] = Value(found, None, describe(found))
        return values


def measure(rounds: Rounds, job: BenchJob, n_rounds: int, n_steps: int | None) -> dict[str, Any]:
    """Return a dict of times, rates and memory sizes, as `Value`s or plain values.

    `n_rounds` must be at least 1. `n_steps` is the number of steps per round. If it is None,
    `steps_per_round` chooses it. All processes must call this.
    """
    rounds.train(n_steps or WARM_UP)
    n_steps = n_steps or steps_per_round(rounds)
    used = memory(rounds.parts.train_step, job.cluster)
    dtype = rounds.run.config.train.dtype
    size = matmul_size()
    product = matmul_rate(size, dtype, job.cluster)
    trained, alone, products = [], [], []
    for number in range(n_rounds):
        job.log(f"round {number + 1} of {n_rounds}, {n_steps} steps in the loop and alone")
        turns = [(trained, rounds.train), (alone, rounds.run_compiled_step)]
        for found, run_round in turns if number % 2 else reversed(turns):
            found.append(run_round(n_steps))
        products.append(product())
    longer = statistics.median(s / a - 1 for s, a in zip(trained, alone, strict=True))
    return {
        "processes": job.cluster.size,
        "rounds": n_rounds,
        "steps_per_round": n_steps,
        **rates(rounds, trained, products, size),
        "alone_seconds_per_step": Value(spread(alone), "s", "the compiled step alone"),
        "more_than_alone": Value(longer, "%", "overhead of the training loop"),
        "compile_seconds": Value(rounds.compile_seconds, "s", f"with tracing; {rounds.cache}"),
        **used,
    }


def steps_per_round(rounds: Rounds) -> int:
    """Return the number of steps (1 to `MAX_STEPS`) that take about `ROUND_SECONDS`.

    Runs `WARM_UP` steps to measure the step time. All processes must call this.
    """
    fill = round(ROUND_SECONDS / rounds.run_compiled_step(WARM_UP))
    return rounds.parts.job.cluster.broadcast(min(MAX_STEPS, max(1, fill)))


def rates(
    rounds: Rounds, seconds: Sequence[float], products: Sequence[float], size: int
) -> dict[str, Any]:
    """Return the time per step and the derived rates, in the format of `measure`.

    For each round, `seconds` holds the seconds per step, and `products` holds the job's FLOP/s in
    `size` x `size` matmuls. The peak FLOP/s and MFU are None if the device's peak is unknown.
    """
    config, mesh, n_parameters = rounds.run.config, rounds.mesh, rounds.steps.n_parameters[1]
    device, dtype = mesh.devices.flat[0].device_kind, config.train.dtype
    peak, per_token = peak_flops(device, dtype), flops_per_token(config.model, n_parameters)
    batch_size, block_size = config.train.batch_size, config.model.block_size
    found = Rates(batch_size, block_size, per_token, mesh.size, peak).of(statistics.median(seconds))
    flops = batch_size * block_size * per_token
    shares = [flops / s / product for s, product in zip(seconds, products, strict=True)]
    beside = f"{dtype} products of {size} x {size} matrices, all devices together"
    return {
        "mesh": dict(mesh.shape),
        "devices": mesh.size,
        "device_kind": device,
        "dtype": dtype,
        "attention": rounds.steps.attention,
        "n_parameters": Value(n_parameters, note="without embeddings used only for lookups"),
        "batch_size": batch_size,
        "block_size": block_size,
        "seconds_per_step": Value(spread(seconds), "s", "in the training loop"),
        "tokens_per_sec": Value(found["tokens_per_sec"], "tokens/s"),
        "flops_per_step": Value(flops, "FLOP"),
        "flops_per_sec_per_device": Value(1e12 * found["tflops_per_device"], "FLOP/s"),
        "peak_flops_per_device": Value(peak, "FLOP/s", "from the data sheet"),
        "mfu": Value(found["mfu"], "%"),
        "matmul_flops_per_sec": Value(spread(products), "FLOP/s", beside),
        "share_of_matmul": Value(statistics.median(shares), "%", "of the FLOP/s of these products"),
    }


def memory(compiled: Any, cluster: ProcessGroup) -> dict[str, Value]:
    """Return a compiled step's memory per device, and the peak memory use so far, in bytes.

    The compiled step's memory does not include its code. All processes must call this. The peak is
    None if a process cannot measure it.
    """
    peaks = cluster.allgather(memory_in_use())
    peak = None if None in peaks else max(peak for _, peak in peaks)
    return {
        "device_compiled_bytes": Value(
            compiled_bytes(compiled), "bytes", "per device, according to the compiler"
        ),
        "peak_bytes": Value(peak, "bytes", "maximum over devices, or over processes on CPUs"),
    }
