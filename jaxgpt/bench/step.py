"""Time, rates and memory of training steps.

Rounds of the trainer's own loop take turns with rounds of the compiled step alone, on one batch
that stays on the device, and with a large matrix product: all three see the same machine.
"""

import contextlib
import io
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from jaxgpt.bench.progress import tell
from jaxgpt.bench.scratch import end_on_signals, scratch_folder
from jaxgpt.cluster.process_group import ProcessGroup, join_process_group
from jaxgpt.config import Config, DataConfig, UsageError, mesh_sizes
from jaxgpt.data.dataset import dataset_directory, vocabulary_size
from jaxgpt.runtime.compile_cache import OFF, use_compile_cache
from jaxgpt.runtime.initialize import initialize_jax
from jaxgpt.train.run_directory import prepare_run

WARM_UP = 3  # steps
ROUNDS = 7
ROUND_SECONDS = 1.5  # where the number of steps is not given
MOST_STEPS = 500  # of such a round
PROFILED = 5  # steps
SYNTHETIC_TOKENS = 2**20


def measure(
    config: Config,
    n_steps: int | None,
    synthetic: bool = False,
    profile_directory: Path | None = None,
) -> dict[str, Any]:
    """Times seven rounds of training steps.

    Args:
        n_steps: of a round; None takes as many as fill 1.5 seconds.
        synthetic: train on random tokens even if the data is here.
        profile_directory: where to write a trace of a few more steps.

    Returns:
        Times, rates and memory; process 0's are those to show.
    """
    cluster = join_process_group(config.init_timeout)
    if profile_directory:
        cluster.run_on_all(make_writable, profile_directory, cluster)
    with scratch_folder(cluster) as folder:
        config, data = with_data(config, synthetic, folder, cluster)
        run = prepare_run(steps_only(config, folder / "run"), cluster)
        facts = initialize_jax(cluster, mesh_sizes(run.config), preemption=True)
        end_on_signals()  # and not at a step: JAX has taken SIGTERM over
        # What is compiled is timed: no cache, or an empty one.
        os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)
        cache = OFF if config.compile_cache == OFF else str(folder / "compiled")
        use_compile_cache(cache, cluster)
        # After initialize_jax, because they import JAX.
        from jaxgpt.bench.job import Job
        from jaxgpt.bench.matmul import fastest_size, matmul_rate

        tell(cluster, "compiling the step")
        with contextlib.redirect_stdout(io.StringIO()):  # what the trainer tells
            job = Job(run, cluster, facts)
            job.trainer(WARM_UP)
            seconds = job.alone(WARM_UP).seconds
            memory = {name: most(cluster.allgather(n)) for name, n in job.memory().items()}
            fill = min(MOST_STEPS, max(1, round(ROUND_SECONDS / seconds)))
            n_steps = cluster.broadcast(n_steps or fill)
            dtype = run.config.train.dtype
            size = fastest_size(dtype, cluster)
            product = matmul_rate(size, dtype, cluster)
            trainer, alone, products = [], [], []
            for number in range(ROUNDS):
                tell(cluster, f"round {number + 1} of {ROUNDS}, {n_steps} steps each way")
                turns = [(trainer, job.trainer), (alone, job.alone)]
                for rounds, run_round in turns if number % 2 else reversed(turns):
                    rounds.append(run_round(n_steps))
                products.append(product())
            profile = job.profile(PROFILED, profile_directory) if profile_directory else None
        return (
            {"config": config.config, "data": data, "steps_per_round": n_steps, "rounds": ROUNDS}
            | rates(job, trainer, products)
            | {"matmul_size": size, "host": host_work(job, trainer, alone, cluster)}
            | {"trace_seconds": job.trace_seconds, "compile_seconds": job.compile_seconds}
            | {"compile_cache": OFF if config.compile_cache == OFF else "empty"}
            | memory
            | {"processes": cluster.size, "attention": job.steps.attention}
            | ({"profile": profile} if profile else {})
        )


def make_writable(directory: Path, cluster: ProcessGroup) -> None:
    """Makes the folder for process 0, which is the one that writes.

    Raises:
        UsageError: if it cannot be written.
    """
    if cluster.is_main:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=directory):
                pass
        except OSError as error:
            raise UsageError(
                f"--profile={directory}: cannot be written ({error.strerror or error}); give "
                "a folder that can"
            ) from None


def with_data(
    config: Config, synthetic: bool, folder: Path, cluster: ProcessGroup
) -> tuple[Config, str]:
    """The configuration with data that is here, and what that is.

    Random tokens take the place of a named data set that has not been prepared.
    """
    data = config.data
    given = data.path or data.file_list or " ".join(data.blend)
    home = dataset_directory(data)
    is_missing = not given and data.dataset != "python" and not (home / "train.bin").exists()
    if not cluster.broadcast(synthetic or is_missing):
        return config, given or data.dataset
    vocab_size = cluster.run_on_all(vocabulary_size, data, config.model)
    least = config.model.block_size + 1
    if cluster.local_rank == 0:
        random = np.random.default_rng(config.train.seed)
        for name, size in (("train.bin", max(least, SYNTHETIC_TOKENS)), ("val.bin", least)):
            # A folder without meta.json holds two bytes a token.
            random.integers(min(vocab_size, 2**16), size=size, dtype="<u2").tofile(folder / name)
    cluster.barrier()
    reason = "--synthetic" if synthetic else f"there is no {home}"
    config = config.replace(data=DataConfig(path=str(folder)), model__vocab_size=vocab_size)
    return config, f"random tokens, because {reason}"


def steps_only(config: Config, directory: Path) -> Config:
    """The same training steps, with nothing between them."""
    action = config.spike.action
    return config.replace(
        out=str(directory),
        train_range_to_skip=(),
        profile_steps=None,
        train__max_iters=2**31 - 1,  # rounds end by themselves
        train__eval_interval=0,
        train__sample_tokens=0,
        train__time_limit=None,
        train__hang_timeout=None,  # nothing tells a watchdog of the steps alone
        checkpoint__interval=0,
        spike__action="log" if action == "rewind" else action,  # both compute the same
    )


def rates(job: Any, trainer: list[Any], products: list[float]) -> dict[str, Any]:
    """What a step takes, and what that means for the devices."""
    from jaxgpt.perf.flops import flops_per_token, peak_flops

    config, mesh = job.run.config, job.mesh
    seconds = [taken.seconds for taken in trainer]
    tokens = config.train.batch_size * config.model.block_size
    flops = tokens * flops_per_token(config.model, job.steps.n_parameters[1])
    kind = mesh.devices.flat[0].device_kind
    peak = peak_flops(kind, config.train.dtype)
    per_device = flops / statistics.median(seconds) / mesh.size
    shares = [flops / s / product for s, product in zip(seconds, products, strict=True)]
    return {
        "mesh": dict(mesh.shape),
        "devices": mesh.size,
        "device_kind": kind,
        "dtype": config.train.dtype,
        "n_parameters": job.steps.n_parameters[1],
        "batch_size": config.train.batch_size,
        "block_size": config.model.block_size,
        "seconds_per_step": spread(seconds),
        "tokens_per_sec": tokens / statistics.median(seconds),
        "flops_per_step": flops,
        "flops_per_sec_per_device": per_device,
        "peak_flops_per_device": peak,
        "mfu": per_device / peak if peak else None,
        "matmul_flops_per_sec": spread(products),
        "share_of_matmul": statistics.median(shares),
    }


def host_work(
    job: Any, trainer: list[Any], alone: list[Any], cluster: ProcessGroup
) -> dict[str, Any]:
    """What processors compute for a step beside the device, in seconds.

    `more_than_alone` is what a step in the trainer takes longer than the compiled step alone, as
    a share of that. `process_seconds` and `kernel_seconds` are of all threads of all processes,
    on CPUs with the step itself.
    """
    loop = statistics.median(taken.thread for taken in trainer)
    loader = job.loader_seconds()
    longer = [t.seconds / a.seconds - 1 for t, a in zip(trainer, alone, strict=True)]
    return {
        "loop_seconds": loop,
        "dispatch_seconds": statistics.median(taken.thread for taken in alone),
        "loader_seconds": loader,
        **{
            f"{name}_seconds": sum(
                cluster.allgather(statistics.median(getattr(taken, name) for taken in trainer))
            )
            for name in ("process", "kernel")
        },
        "share": (loop + loader) / statistics.median(taken.seconds for taken in trainer),
        "alone_seconds": spread([taken.seconds for taken in alone]),
        "more_than_alone": statistics.median(longer),
    }


def spread(values: list[float]) -> dict[str, float]:
    """median, least, most, and the quartiles `low` and `high`."""
    low, median, high = np.percentile(values, [25, 50, 75]).tolist()
    return {"median": median, "least": min(values), "low": low, "high": high, "most": max(values)}


def most(values: list[int | None]) -> int | None:
    """The largest of the processes' numbers; None where they have none."""
    return None if None in values else max(values)


def flops_text(rate: float) -> str:
    return f"{rate / 1e12:,.1f} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:,.1f} GFLOP/s"


def describe(found: dict[str, Any]) -> str:
    """What `measure` found, in words."""
    from jaxgpt.perf import profile

    step, product, host = found["seconds_per_step"], found["matmul_flops_per_sec"], found["host"]
    mfu = "-, the peak is not known" if found["mfu"] is None else f"{found['mfu']:.1%}"
    size = found["matmul_size"]
    several = "processes" if found["processes"] > 1 else "process"
    mesh = " ".join(f"{axis}={n}" for axis, n in found["mesh"].items())
    device_peak = found["device_peak_bytes"]
    mib = 2.0**-20
    return "\n".join(
        [
            f"step: {found['config']}, {found['n_parameters'] / 1e6:.2f}M parameters, batches of "
            f"{found['batch_size']} x {found['block_size']} tokens, {found['dtype']}",
            f"on: {found['devices']} x {found['device_kind']}, {found['processes']} {several}, "
            f"mesh {mesh}; attention: {found['attention']}",
            f"data: {found['data']}",
            f"time: {1e3 * step['median']:.2f} ms a step, the median of {found['rounds']} rounds "
            f"of {found['steps_per_round']} ({1e3 * step['least']:.2f} to "
            f"{1e3 * step['most']:.2f}, half of them {1e3 * step['low']:.2f} to "
            f"{1e3 * step['high']:.2f})",
            f"rates: {found['tokens_per_sec']:,.0f} tokens/s; "
            f"{flops_text(found['flops_per_sec_per_device'])} on each device, mfu {mfu}",
            f"limit: {found['share_of_matmul']:.1%} of the {flops_text(product['median'])} that "
            f"all devices together reach in {found['dtype']} products of {size} x {size} matrices",
            f"host: {1e3 * host['loop_seconds']:.2f} ms a step in the loop "
            f"({1e3 * host['dispatch_seconds']:.2f} of them to start it), "
            f"{1e3 * host['loader_seconds']:.2f} in the loader: {host['share']:.1%} of the step; "
            f"the trainer against the compiled step alone: {host['more_than_alone']:+.1%}",
            f"processors: all threads of all processes compute {1e3 * host['process_seconds']:.1f} "
            f"ms a step, {1e3 * host['kernel_seconds']:.1f} of them in the operating system",
            f"compile: {found['compile_seconds']:.1f} s, after {found['trace_seconds']:.1f} s of "
            f"tracing; compile cache: {found['compile_cache']}",
            f"memory: {mib * found['device_compiled_bytes']:,.0f} MiB on a device by the "
            "compiler's account"
            + ("" if device_peak is None else f", {mib * device_peak:,.0f} at the most")
            + f"; {mib * found['process_peak_bytes']:,.0f} MiB of a process at the most",
            *([profile.describe(found["profile"])] if "profile" in found else []),
        ]
    )
