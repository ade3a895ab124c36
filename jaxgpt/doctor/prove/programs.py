"""The compiled step: what is expensive in it, and what makes it faster."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from jaxgpt.doctor.prove.facts import copy_rate
from jaxgpt.doctor.prove.speed import GPT2_ON_CPU
from jaxgpt.doctor.prove.stage import Needs, Stage, StageFailure, last_words
from jaxgpt.perf.roofline import Work

# What may make a step of gpt2 faster: settings, and variables of the environment.
VARIANTS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "command buffers off": ((), {"XLA_FLAGS": "--xla_gpu_enable_command_buffer="}),
    "loss_chunk=0": (("train.loss_chunk=0",), {}),
    "loss_chunk=32768": (("train.loss_chunk=32768",), {}),
    "half the microbatch": (("train.gradient_accumulation_steps=10",), {}),
    "twice the microbatch": (("train.gradient_accumulation_steps=3",), {}),
    "Triton GEMM off": ((), {"XLA_FLAGS": "--xla_gpu_enable_triton_gemm=false"}),
    "cuBLASLt": ((), {"XLA_FLAGS": "--xla_gpu_enable_cublaslt=true"}),
    "JAX_OPTIMIZATION_LEVEL=O1": ((), {"JAX_OPTIMIZATION_LEVEL": "O1"}),
    "autotune level 0": ((), {"XLA_FLAGS": "--xla_gpu_autotune_level=0"}),
    "attention=xla": (("model.attention=xla", "parallel.remat=attention"), {}),
    "remat=dots": (("parallel.remat=dots",), {}),
    "scan_layers=True": (("parallel.scan_layers=True",), {}),
    "latency hiding off": (
        (), {"XLA_FLAGS": "--xla_gpu_enable_latency_hiding_scheduler=false"},
    ),
}  # fmt: skip
ON_CPU = {
    "loss_chunk=128": (("train.loss_chunk=128",), {}),
    "remat=attention": (("parallel.remat=attention",), {}),
    "scan_layers=True": (("parallel.scan_layers=True",), {}),
}
ROOFLINE = "the roofs: this device's rate of copying, and its fastest matrix product"
PAIR_SECONDS = 20.0  # at least, for two commands: with less left no pair is begun


def gpt2(stage: Stage) -> tuple[str, ...]:
    words = ("--steps", "3") if stage.on_gpu else ("--steps", "1", *GPT2_ON_CPU)
    return ("bench", "step", "--config", "gpt2", *words)


def profile(stage: Stage) -> None:
    """List the most expensive operations of a gpt2 step, and what each loses to its roofline."""
    step = stage.json(*gpt2(stage), "--profile", str(stage.folder / "trace"))
    found, total = step["profile"], step["profile"]["device_seconds"]
    bandwidth, peak = copy_rate(stage.on_gpu), step["matmul_flops_per_sec"]["median"]
    lost = 0.0
    for category, seconds in found["categories"].items():
        if seconds:
            stage.add(f"share of {category}", seconds / total, "%")
    for operation in found["operations"]:
        note = f"{operation['category']}, {operation['source']}"
        if operation["work"]:
            least = Work(**operation["work"]).least_seconds(bandwidth, peak)
            lost += max(0.0, operation["seconds"] - least)
            note += f"; {1e3 * least:.3g} ms by its bytes and FLOPs"
        stage.add(operation["name"], 1e3 * operation["seconds"], "ms", note)
    stage.add("these operations beyond their rooflines", 1e3 * lost, "ms", ROOFLINE)


def sweep(stage: Stage) -> None:
    """Time variants of the gpt2 step, each in a pair with the default; the best come first."""
    for name, (words, env) in (VARIANTS if stage.on_gpu else ON_CPU).items():
        if stage.left() < PAIR_SECONDS:
            stage.add("variants left out for lack of time", name)
            break
        try:
            ratio = seconds_of(stage) / seconds_of(stage, *words, env=env)
        except StageFailure as failure:
            stage.add(name, None, note=str(failure)[:200])
            continue
        stage.add(name, ratio, "x", "tokens/s against the default")
    stage.result.rows.sort(key=lambda row: -(row.value if isinstance(row.value, float) else 0))


def seconds_of(stage: Stage, *words: str, env: dict[str, str] | None = None) -> float:
    found: dict[str, Any] = stage.json(*gpt2(stage), *words, env=env)
    return found["seconds_per_step"]["median"]


def tests(stage: Stage) -> None:
    """Run the tests that are marked `gpu`, which also run on CPUs."""
    root = Path(__file__).parents[3]
    if importlib.util.find_spec("pytest") is None:
        raise Needs("pytest: pip install pytest")
    if not (root / "tests").is_dir():
        raise Needs("the tests: run from a checkout")
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    ended = subprocess.run([*command, "tests"], cwd=root, capture_output=True, text=True)
    print(ended.stdout + ended.stderr, flush=True)
    closing = ended.stdout.strip().rpartition("\n")[2]
    if ended.returncode not in (0, 1):
        raise StageFailure(f"pytest: {last_words(ended)}")
    counts = {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|error)", closing)}
    stage.add("passed", counts.get("passed", 0))
    stage.add("failed", counts.get("failed", 0) + counts.get("error", 0))
