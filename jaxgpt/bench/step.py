"""Time, rates and memory of training steps.

Rounds of the trainer's own loop take turns with rounds of the compiled step alone, on one batch
that stays on the device, and with a large matrix product: all three see the same machine.
"""

import contextlib
import io
import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxgpt.bench.harness import (
    PROG,
    Result,
    log_progress,
    remove_on_signals,
    scratch_folder,
)
from jaxgpt.cluster.process_group import ProcessGroup, join_process_group
from jaxgpt.config import Config, DataConfig, UsageError, mesh_shape, parse_args
from jaxgpt.data.dataset import dataset_directory, vocabulary_size
from jaxgpt.perf.units import count
from jaxgpt.runtime.compile_cache import OFF, use_compile_cache
from jaxgpt.runtime.initialize import initialize_jax
from jaxgpt.train.run_directory import prepare_run

WARM_UP = 3  # steps
ROUNDS = 7
ROUND_SECONDS = 1.5  # where the number of steps is not given
MAX_STEPS = 500  # of such a round
PROFILED = 5  # steps
SYNTHETIC_TOKENS = 2**20


def run(
    settings: Sequence[str],
    steps: int | None = None,
    synthetic: bool = False,
    profile: Path | None = None,
) -> Result:
    """Time seven rounds of training steps.

    Args:
        settings: as for jaxgpt.train.
        steps: of a round; None takes as many as fill 1.5 seconds.
        synthetic: train on random tokens even if the data is here.
        profile: where to write a trace of a few more steps.

    Raises:
        UsageError: if the steps cannot be run, or `profile` cannot be written.
    """
    config = parse_args(settings, PROG)
    cluster = join_process_group(config.init_timeout)
    if profile:
        cluster.run_on_all(make_writable, profile, cluster)
    with scratch_folder(cluster) as folder:
        config, data = with_data(config, synthetic, folder, cluster)
        run = prepare_run(steps_only(config, folder / "run"), cluster)
        facts = initialize_jax(cluster, mesh_shape(run.config), preemption=True)
        remove_on_signals(folder)  # JAX has taken SIGTERM over
        # Compilation is timed: no cache, or an empty one.
        os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)
        cache = OFF if config.compile_cache == OFF else str(folder / "compiled")
        use_compile_cache(cache, cluster)
        from jaxgpt.bench.job import Job  # imports JAX, after initialize_jax

        log_progress(cluster, "compiling the step")
        with contextlib.redirect_stdout(io.StringIO()):  # of the trainer
            job = Job(run, cluster, facts)
            remove_on_signals(folder)  # and not after a step
            values = measure(job, cluster, steps, profile)
        values |= {
            "config": config.config,
            "data": data,
            "compile_cache": OFF if config.compile_cache == OFF else "empty",
        }
        return Result(values, rows(values))


def measure(
    job: Any, cluster: ProcessGroup, n_steps: int | None, profile: Path | None
) -> dict[str, Any]:
    """Return times, rates and memory of a job; arguments as for `run`."""
    from jaxgpt.bench.job import fastest_size, matmul_rate

    job.trainer(WARM_UP)
    seconds = job.alone(WARM_UP).seconds
    memory = {name: _most(cluster.allgather(n)) for name, n in job.memory().items()}
    fill = min(MAX_STEPS, max(1, round(ROUND_SECONDS / seconds)))
    n_steps = cluster.broadcast(n_steps or fill)
    dtype = job.run.config.train.dtype
    size = fastest_size(dtype, cluster)
    product = matmul_rate(size, dtype, cluster)
    trainer, alone, products = [], [], []
    for number in range(ROUNDS):
        log_progress(cluster, f"round {number + 1} of {ROUNDS}, {n_steps} steps each way")
        turns = [(trainer, job.trainer), (alone, job.alone)]
        for clocks, run_round in turns if number % 2 else reversed(turns):
            clocks.append(run_round(n_steps))
        products.append(product())
    return {
        "steps_per_round": n_steps,
        "rounds": ROUNDS,
        **rates(job, trainer, products),
        "matmul_size": size,
        "host": host_work(job, trainer, alone, cluster),
        "trace_seconds": job.trace_seconds,
        "compile_seconds": job.compile_seconds,
        **memory,
        "processes": cluster.size,
        "attention": job.steps.attention,
        **({"profile": job.profile(PROFILED, profile)} if profile else {}),
    }


def make_writable(directory: Path, cluster: ProcessGroup) -> None:
    """Make the folder that process 0 writes the trace to.

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
    """Return a configuration whose data is here, and a description of that data.

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
    """Return a configuration of the same training steps with nothing between them."""
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
    """Return the time of a step, and what it means for the devices."""
    from jaxgpt.perf.flops import flops_per_token, peak_flops

    config, mesh = job.run.config, job.mesh
    seconds = [clocks.seconds for clocks in trainer]
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
    """Return the seconds that processors compute for a step beside the device.

    `more_than_alone` is the share by which a step in the trainer takes longer than the compiled
    step alone. `process_seconds` and `kernel_seconds` are of all threads of all processes, on
    CPUs with the step itself.
    """

    def median(name: str, clocks: list[Any] = trainer) -> float:
        return statistics.median(getattr(one, name) for one in clocks)

    loop, loader = median("thread"), job.loader_seconds()
    longer = [t.seconds / a.seconds - 1 for t, a in zip(trainer, alone, strict=True)]
    return {
        "loop_seconds": loop,
        "dispatch_seconds": median("thread", alone),
        "loader_seconds": loader,
        "process_seconds": sum(cluster.allgather(median("process"))),
        "kernel_seconds": sum(cluster.allgather(median("kernel"))),
        "share": (loop + loader) / median("seconds"),
        "alone_seconds": spread([clocks.seconds for clocks in alone]),
        "more_than_alone": statistics.median(longer),
    }


def spread(values: list[float]) -> dict[str, float]:
    """Return median, least, most, and the quartiles `low` and `high`."""
    low, median, high = np.percentile(values, [25, 50, 75]).tolist()
    return {"median": median, "least": min(values), "low": low, "high": high, "most": max(values)}


def _most(values: list[int | None]) -> int | None:
    return None if None in values else max(values)


def flops_text(rate: float) -> str:
    return f"{rate / 1e12:,.1f} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:,.1f} GFLOP/s"


def rows(values: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the values in words."""
    from jaxgpt.perf import profile

    host, product = values["host"], values["matmul_flops_per_sec"]
    ms = {name: 1e3 * seconds for name, seconds in values["seconds_per_step"].items()}
    mfu = "-, the peak is not known" if values["mfu"] is None else f"{values['mfu']:.1%}"
    size, peak = values["matmul_size"], values["device_peak_bytes"]
    mesh = " ".join(f"{axis}={n}" for axis, n in values["mesh"].items())
    mib = 2.0**-20
    profiled = profile.describe(values["profile"]) if "profile" in values else ""
    return [
        ("step", f"{values['config']}, {values['n_parameters'] / 1e6:.2f}M parameters, batches of "
         f"{values['batch_size']} x {values['block_size']} tokens, {values['dtype']}"),
        ("on", f"{values['devices']} x {values['device_kind']}, "
         f"{count(values['processes'], 'process', 'es')}, mesh {mesh}; attention: "
         f"{values['attention']}"),
        ("data", values["data"]),
        ("time", f"{ms['median']:.2f} ms a step, the median of {values['rounds']} rounds of "
         f"{values['steps_per_round']} ({ms['least']:.2f} to {ms['most']:.2f}, half of them "
         f"{ms['low']:.2f} to {ms['high']:.2f})"),
        ("rates", f"{values['tokens_per_sec']:,.0f} tokens/s; "
         f"{flops_text(values['flops_per_sec_per_device'])} on each device, mfu {mfu}"),
        ("limit", f"{values['share_of_matmul']:.1%} of the {flops_text(product['median'])} that "
         f"all devices together reach in {values['dtype']} products of {size} x {size} matrices"),
        ("host", f"{1e3 * host['loop_seconds']:.2f} ms a step in the loop "
         f"({1e3 * host['dispatch_seconds']:.2f} to dispatch the step), "
         f"{1e3 * host['loader_seconds']:.2f} in the loader: {host['share']:.1%} of the step; "
         f"the trainer against the compiled step alone: {host['more_than_alone']:+.1%}"),
        ("CPU time", f"{1e3 * host['process_seconds']:.1f} ms a step, all threads of all "
         f"processes; {1e3 * host['kernel_seconds']:.1f} of it in the operating system"),
        ("compile", f"{values['compile_seconds']:.1f} s, after {values['trace_seconds']:.1f} s of "
         f"tracing; compile cache: {values['compile_cache']}"),
        ("memory", f"{mib * values['device_compiled_bytes']:,.0f} MiB on a device by the "
         "compiler's account" + ("" if peak is None else f", {mib * peak:,.0f} at the peak")
         + f"; {mib * values['process_peak_bytes']:,.0f} MiB at the peak of a process"),
        *([("profile", profiled.removeprefix("profile of "))] if profiled else []),
    ]  # fmt: skip
