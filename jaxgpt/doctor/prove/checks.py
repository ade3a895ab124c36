"""The checks of `prove`, which run commands and yield a row for each measurement."""

import functools
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxgpt.cluster.hardware import accelerator_expected
from jaxgpt.cluster.timeouts import COMMAND
from jaxgpt.config import DataConfig
from jaxgpt.data.dataset import dataset_directory
from jaxgpt.doctor.prove.measure import Commands, Missing, Row, row
from jaxgpt.perf.hardware import find_device
from jaxgpt.perf.roofline import Work
from jaxgpt.tracking.jsonl import read_records

ROOT = Path(__file__).parents[3]
WHOLE = "train.gradient_accumulation_steps=1"
NVIDIA = "driver_version,clocks.sm,clocks.max.sm,power.limit"
SMALL_GPT2 = (
    "model.block_size=64", "model.n_layer=2", "train.batch_size=2", "train.dtype=float32", WHOLE,
)  # fmt: skip
# Maps a name to the number of steps per round and the settings for `bench step`. `gpt2` and
# `gpt2-xl` have separate checks.
STEPS_ON_GPU = {
    "gpt2": (3, ("--config", "gpt2")),
    "gpt2-xl": (
        2, ("--config", "gpt2-xl", "train.batch_size=96", "train.gradient_accumulation_steps=8")
    ),
    "gpt2-medium": (2, ("--config", "gpt2-medium", "train.batch_size=16", WHOLE)),
}  # fmt: skip
STEPS_ON_CPU = {
    "gpt2": (1, ("--config", "gpt2", *SMALL_GPT2)),
    "gpt2-xl": (1, ("--config", "gpt2-xl", *SMALL_GPT2, "model.n_layer=1", "train.batch_size=1")),
    "tiny": (1, ("--config", "tiny", "model.n_embd=256", "train.batch_size=32")),
}
GOALS = {  # (name, row) -> device -> minimum; llm.c: 468,000 tokens/s and 49% MFU on an H100
    ("gpt2", "tokens/s"): {"h100": 500_000, "h200": 560_000},
    ("gpt2-xl", "MFU"): {"h100": 0.55, "h200": 0.55},
}
NANOGPT_ON_GPU = (
    "--config", "gpt2", "--compile", "--rounds", "6", "--steps", "1",
    "train.gradient_accumulation_steps=20",
)  # fmt: skip
NANOGPT_ON_CPU = ("--config", "shakespeare_char_cpu", "--rounds", "6", "--steps", "5")
# Changes that may make a `gpt2` step faster on a GPU, most promising first.
SWEEP_ON_GPU = (
    "xla_gpu_enable_cublaslt=true",
    "jax_optimization_level=O1",
    "xla_gpu_enable_command_buffer=",
    "xla_gpu_enable_triton_gemm=false",
    "xla_gpu_enable_latency_hiding_scheduler=true",
    "xla_gpu_autotune_level=0",
)
SWEEP_ON_CPU = ("parallel.remat=full",)
AB_ON_GPU = (
    "--config", "gpt2", "train.batch_size=96", WHOLE, "--rounds", "7", "--steps", "4",
)  # fmt: skip
AB_ON_CPU = ("--config", "gpt2", *SMALL_GPT2, "--rounds", "3", "--steps", "1")
PARTS = 20  # number of rows in the profile
QUIET = (
    "train.eval_interval=0", "train.sample_tokens=0", "train.log_interval=1", "data.dataset=python",
)  # fmt: skip
NUMERICS_STEPS = 50
NUMERICS = (
    "--config", "shakespeare_char", "model.dropout=0", f"train.max_iters={NUMERICS_STEPS}",
    "train.batch_size=8", "optimizer.warmup_iters=10", "checkpoint.interval=0", *QUIET,
)  # fmt: skip
SMALL = ("model.n_layer=2", "model.n_embd=128", "model.n_head=4")
TOLERANCE = 0.02  # largest acceptable relative difference for bfloat16
RESUME_STEPS = 40
KILL_STEP = 30
RESUME = (
    "checkpoint.interval=8", f"optimizer.lr_decay_iters={RESUME_STEPS}",
    "train.deterministic=True", *QUIET,
)  # fmt: skip
RESUME_ON_CPU = ("--config", "tiny", "model.n_layer=2", "train.batch_size=8", *RESUME)
RESUME_ON_GPU = (
    "--config", "gpt2", "train.batch_size=16", WHOLE, "optimizer.warmup_iters=10", *RESUME,
)  # fmt: skip


def facts(commands: Commands) -> Iterator[Row]:
    """Report the doctor's findings and, if nvidia-smi exists, the driver, clocks and power limit.

    If nvidia-smi fails or hangs, its row counts as a missed goal.
    """
    out = str(commands.folder / "runs")
    printed = commands.run("jaxgpt.doctor", "--out", out, accepted=(0, 1))
    for line in printed.splitlines():
        if line.startswith(("OK ", "WARN ", "FAIL ")):
            name, _, finding = line[5:].partition(": ")
            status = line[:4].strip()
            yield Row(name, finding, note=status, met=False if status == "FAIL" else None)
    if shutil.which("nvidia-smi"):
        yield _nvidia_facts()


def _nvidia_facts() -> Row:
    query = ["nvidia-smi", f"--query-gpu={NVIDIA}", "--format=csv,noheader"]
    try:
        ran = subprocess.run(query, capture_output=True, text=True, timeout=COMMAND)
    except subprocess.TimeoutExpired:
        return Row(NVIDIA, f"nvidia-smi did not end within {COMMAND:.0f} s", met=False)
    if ran.returncode:
        text = f"nvidia-smi ended with status {ran.returncode}: {ran.stdout}{ran.stderr}"
        return Row(NVIDIA, text, met=False)
    return Row(NVIDIA, ran.stdout)


def speed(commands: Commands, *, name: str) -> Iterator[Row]:
    """Report the speed that `bench step` measures for the settings named `name`.

    The names are the keys of `STEPS_ON_GPU` or, if there is no GPU, of `STEPS_ON_CPU`. Saves the
    measurement for the `memory` check.
    """
    found = _bench_step(commands, name)
    device = find_device(found["device_kind"])
    for row_name, value, unit, note in (
        ("tokens/s", found["tokens_per_sec"], "", found["data"]),
        ("time per step", 1e3 * found["seconds_per_step"]["median"], "ms", ""),
        ("MFU", found["mfu"], "%", "" if found["mfu"] else "peak FLOP/s unknown"),
        ("FLOP/s relative to a large matrix product", found["share_of_matmul"], "%", ""),
        ("attention", found["attention"], "", ""),
        ("compile time", found["compile_seconds"], "s", ""),
    ):
        goals = GOALS.get((name, row_name), {}) if commands.on_gpu and device else {}
        yield row(row_name, value, unit, note, at_least=goals.get(device.name) if goals else None)


def nanogpt(commands: Commands) -> Iterator[Row]:
    """Time jaxgpt and nanoGPT in alternating rounds, with the same initial weights and data.

    Raises `Missing` if the comparison scripts or a clone of nanoGPT are missing.
    """
    script, clone = ROOT / "tests/peers/nanogpt.py", commands.nanogpt
    if not script.exists():
        raise Missing("the comparison scripts; run from a clone of jaxgpt")
    if clone is None or not (clone / "model.py").exists():
        raise Missing("a clone of nanoGPT; pass its path as --nanogpt DIR")
    peer = ("--repo", str(clone), "--torch", commands.torch, commands.cache)
    found = commands.json(
        str(script), *peer, *(NANOGPT_ON_GPU if commands.on_gpu else NANOGPT_ON_CPU), **_first_gpu()
    )
    least, most = min(found["ratios"]), max(found["ratios"])
    note = f"{least:.2f} to {most:.2f}; losses differ by {found['loss_difference']:.1g}"
    goal = 1.15 if commands.on_gpu else None
    yield row(f"speed of {found['config']}", found["ratio"], "x", note, at_least=goal)


def numerics(commands: Commands) -> Iterator[Row]:
    """Compare each step's bfloat16 loss with its float32 loss.

    Raises `ValueError` if the runs logged different numbers of steps, or no steps.
    """
    single, lower = (
        _history(train(commands, dtype, *_numerics(commands), f"train.dtype={dtype}"))
        for dtype in ("float32", "bfloat16")
    )
    note = f"{NUMERICS_STEPS} steps"
    error = _relative_difference(lower, single)
    yield row("losses in bfloat16 against float32", error, note=note, at_most=TOLERANCE)


def kernels(commands: Commands) -> Iterator[Row]:
    """Compare attention kernels with XLA's attention.

    On a GPU, also compare the losses of a float32 run with those of the same run on a CPU. Raises
    `ValueError` if the runs logged different numbers of steps, or no steps.
    """
    if commands.on_gpu:
        words = (*_numerics(commands), "train.dtype=float32")
        here = _history(train(commands, "here", *words))
        on_cpu = _history(train(commands, "cpu", *words, JAX_PLATFORMS="cpu"))
        yield Row("losses in float32 against the CPU", _relative_difference(here, on_cpu))
    for name, found in commands.json("jaxgpt.doctor.prove.attention").items():
        forward, gradient, kernel = found
        yield row(f"{name}, forward", forward, note=kernel, at_most=TOLERANCE)
        yield row(f"{name}, gradient", gradient, at_most=TOLERANCE)


def resume(commands: Commands) -> Iterator[Row]:
    """Compare an uninterrupted run with a run that is stopped, resumed, killed and resumed again.

    Raises `ValueError` if the runs have logged different numbers of steps.
    """
    words = RESUME_ON_GPU if commands.on_gpu else RESUME_ON_CPU
    end, middle = (f"train.max_iters={n}" for n in (RESUME_STEPS, RESUME_STEPS // 2))
    whole = _history(train(commands, "whole", *words, end))
    out = train(commands, "parts", *words, middle)
    commands.kill_when(
        lambda: len(_history(out)) >= KILL_STEP,
        "jaxgpt.train", *words, end, commands.cache, "--out", str(out),
    )  # fmt: skip
    parts = _history(train(commands, "parts", *words, end))
    differing = sum(a != b for a, b in zip(whole, parts, strict=True))
    name = f"steps (of {RESUME_STEPS}) that differ from an uninterrupted run"
    yield row(name, differing, note="loss and gradient norm", at_most=0, source="bitwise")


def memory(commands: Commands) -> Iterator[Row]:
    """Compare the memory and step time that `plan` predicts with the results of `bench step`.

    A step time that `plan` does not predict is left out. Reuses the measurements of earlier checks.
    Raises `Missing` if this GPU is not in the hardware table, or if the peak memory is unknown.
    """
    for name, (_, settings) in _steps(commands).items():
        saved = _saved_step(commands, name)
        found = json.loads(saved.read_text()) if saved.exists() else _bench_step(commands, name)
        device = find_device(found["device_kind"])
        if commands.on_gpu and device is None:
            raise Missing(f"a row for {found['device_kind']} in jaxgpt/perf/hardware.py")
        if found["peak_bytes"] is None:
            raise Missing("a device that reports its peak memory")
        device_name = device.name if device else "cpu"
        plan = commands.json("jaxgpt.plan", "--device", device_name, "--mesh", "1,1,1", *settings)
        planned, used = plan["memory"]["total"], found["peak_bytes"]
        note = f"planned {planned / 2**20:,.0f} MiB, in use {used / 2**20:,.0f} MiB"
        goal = 0.10 if commands.on_gpu else None  # on a CPU, the peak includes the whole process
        yield row(f"error of the plan for {name}", abs(planned / used - 1), "%", note, at_most=goal)
        if plan["estimate"]:
            planned, took = plan["estimate"]["step"], found["seconds_per_step"]["median"]
            note = f"planned {1e3 * planned:.4g} ms, took {1e3 * took:.4g} ms"
            goal = 0.20 if commands.on_gpu else None  # the small steps on CPUs are not typical
            error = abs(planned / took - 1)
            yield row(f"error of the step time for {name}", error, "%", note, at_most=goal)


def profile(commands: Commands) -> Iterator[Row]:
    """List the most expensive parts of a gpt2 step, with roofline times if known.

    A part consists of all operations of one category from the same source line. Raises `Missing` if
    the trace has no operations.
    """
    words = ("--steps", "1", "--rounds", "1", "--profile", str(commands.folder / "trace"))
    # Disable CUDA graphs, because the trace would not show their operations.
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_command_buffer=".strip()
    settings = _steps(commands)["gpt2"][1]
    step = _bench(commands, "step", *words, *settings, XLA_FLAGS=flags)
    found, device = step["profile"], find_device(step["device_kind"])
    if not found["device_seconds"]:
        raise Missing("permission to profile (NVIDIA: NVreg_RestrictProfilingToAdminUsers=0)")
    yield Row("all operations", 1e3 * found["device_seconds"], "ms")
    for category, seconds in found["categories"].items():
        yield Row(f"share of {category}", seconds / found["device_seconds"], "%")
    for part in found["parts"][:PARTS]:
        note = f"{part['bytes'] / 1e9:.3g} GB, {part['flops'] / 1e12:.3g} TFLOP"
        if device and device.memory_bandwidth:
            peak = step["matmul_flops_per_sec"]["median"]
            work = Work(1, part["bytes"], 0, part["flops"])
            note += f"; roofline {1e3 * work.least_seconds(device.memory_bandwidth, peak):.3g} ms"
        yield Row(f"{part['category']} {part['source']}".strip(), 1e3 * part["seconds"], "ms", note)


def ab(commands: Commands, *, changes: Sequence[str]) -> Iterator[Row]:
    """Time a gpt2 step with each of several changes; see `bench ab`."""
    words = [word for change in changes for word in ("--change", change)]
    found = _bench(commands, "ab", *(AB_ON_GPU if commands.on_gpu else AB_ON_CPU), *words)
    moved, seconds = found["bytes_moved"], found["seconds_per_step"]
    for change, ratio in found["ratio"].items():
        note = "; ".join(
            f"{1e3 * seconds[name]:.4g} ms and {moved[name] / 1e9:.4g} GB {when}"
            for name, when in ((change, "with it"), ("unchanged", "without"))
        )
        note = f"{ratio['least']:.3f} to {ratio['most']:.3f}; {note}"
        yield Row(f"time per step with {change}", ratio["median"], "x", note)


def shakespeare(commands: Commands) -> Iterator[Row]:
    """Train a small Shakespeare model: to the end on a GPU, or for 250 steps on a CPU.

    If the dataset does not exist, it is prepared from `commands.text`. Raises `Missing` if there is
    neither a dataset nor a text file. Raises `ValueError` if no validation loss is finite.
    """
    if not (dataset_directory(DataConfig(dataset="shakespeare_char")) / "train.bin").exists():
        if commands.text is None:
            raise Missing("the text of Tiny Shakespeare; pass its path as --text FILE")
        commands.run("jaxgpt.prepare", "shakespeare_char", "--input", str(commands.text))
    gpu = ("--config", "shakespeare_char", "train.dtype=bfloat16")
    cpu = ("--config", "shakespeare_char_cpu", "train.max_iters=250", "train.eval_iters=5")
    out = train(commands, "run", *(gpu if commands.on_gpu else cpu), "train.sample_tokens=0")
    records = read_records(out / "metrics.jsonl", "eval")
    best = min(r["val_loss"] for r in records if r["val_loss"] is not None)
    goal = 1.48 if commands.on_gpu else None
    yield row("best validation loss", best, at_most=goal, source="nanoGPT: 1.47")


Check = tuple[Callable[[Commands], Iterator[Row]], float]
"""A generator of rows, and its time limit in seconds."""


def ab_check(changes: Sequence[str]) -> dict[str, Check]:
    """Return an entry for `CHECKS`: a check that times a gpt2 step with each of `changes`."""
    limit = 60 + 30 * len(changes)  # seconds
    return {f"ab: {'; '.join(changes)}": (functools.partial(ab, changes=changes), limit)}


# Most important first. Each limit is about twice the longer of two durations: on two busy CPU
# cores, and on an H100 (estimated from step times on an H200).
CHECKS: dict[str, Check] = {
    "facts": (facts, 90),
    "gpt2": (functools.partial(speed, name="gpt2"), 120),
    "nanogpt": (nanogpt, 200),
    "gpt2-xl": (functools.partial(speed, name="gpt2-xl"), 150),
    "numerics": (numerics, 150),
    "resume": (resume, 180),
    "memory": (memory, 150),
    "profile": (profile, 90),
    **{
        name: check
        for change in (SWEEP_ON_GPU if accelerator_expected() else SWEEP_ON_CPU)
        for name, check in ab_check([change]).items()
    },
    "kernels": (kernels, 150),
    "shakespeare": (shakespeare, 300),
}


def _steps(commands: Commands) -> dict[str, tuple[int, tuple[str, ...]]]:
    return STEPS_ON_GPU if commands.on_gpu else STEPS_ON_CPU


def _numerics(commands: Commands) -> tuple[str, ...]:
    return NUMERICS if commands.on_gpu else (*NUMERICS, *SMALL)


def _saved_step(commands: Commands, name: str) -> Path:
    return commands.folder.parent / f"{name}.json"


def _bench(commands: Commands, *words: str, **variables: str) -> dict[str, Any]:
    """Run a benchmark on one device, and return its JSON output."""
    words = (*words, "--mesh", "1,1,1", commands.cache)
    return commands.json("jaxgpt.bench", *words, **_first_gpu(), **variables)


def _first_gpu() -> dict[str, str]:
    """Return environment variables that hide all GPUs except the first visible one."""
    names = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
    return {name: os.environ.get(name, "0").partition(",")[0] for name in names}


def _bench_step(commands: Commands, name: str) -> dict[str, Any]:
    """Return the result of `bench step` for the settings named `name`; save it for `memory`."""
    n_steps, settings = _steps(commands)[name]
    found = _bench(commands, "step", "--steps", str(n_steps), "--rounds", "3", *settings)
    _saved_step(commands, name).write_text(json.dumps(found))
    return found


def train(commands: Commands, name: str, *words: str, **variables: str) -> Path:
    """Run training to the end; return the run directory. An existing run is resumed.

    `name` is the run directory's name in the check's folder. `words` are the arguments, and
    `variables` are added to the environment.
    """
    out = commands.folder / name
    commands.run("jaxgpt.train", *words, commands.cache, "--out", str(out), **variables)
    return out


def _history(out: Path) -> list[tuple[float, float]]:
    """Return the loss and the gradient norm of each logged training step.

    Non-finite numbers are returned as None. Raises `OSError` if metrics.jsonl cannot be read.
    """
    return [(r["loss"], r["grad_norm"]) for r in read_records(out / "metrics.jsonl", "train")]


def _relative_difference(
    found: Sequence[tuple[float, float]], expected: Sequence[tuple[float, float]]
) -> float:
    """Return the largest relative error of the losses in `found`, compared with `expected`.

    Both arguments hold (loss, gradient norm) for the same steps. Returns NaN if a loss is None.
    Raises `ValueError` if the arguments have different lengths or are empty.
    """
    pairs = [(x, y) for (x, _), (y, _) in zip(found, expected, strict=True)]
    losses, of = np.array(pairs, float).T
    return float(np.max(np.abs(losses - of) / np.abs(of)))
