"""The checks of `prove`, which run commands and yield a row for each measurement.

All of them raise the same errors as the methods of `Commands`.
"""

import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxgpt.config import DataConfig
from jaxgpt.data.dataset import dataset_directory
from jaxgpt.doctor.prove.measure import Commands, Missing, Row, row
from jaxgpt.perf.hardware import find_device
from jaxgpt.perf.roofline import Work
from jaxgpt.tracking.jsonl import read_records

ROOT = Path(__file__).parents[3]
WHOLE = "train.gradient_accumulation_steps=1"
NVIDIA = "driver_version,clocks.sm,clocks.max.sm,power.limit"
GPT2_ON_CPU = (
    "--steps", "1", "model.block_size=64", "model.n_layer=2", "train.batch_size=2",
    "train.dtype=float32", WHOLE,
)  # fmt: skip
GPT2_XL_ON_CPU = (*GPT2_ON_CPU, "model.n_layer=1", "train.batch_size=1")
GPT2_XL_ON_GPU = ("train.batch_size=96", "train.gradient_accumulation_steps=8")
NANOGPT_ON_GPU = {
    "gpt2": ("--compile", "--steps", "2", "train.gradient_accumulation_steps=20"),
    "shakespeare_char": ("--compile", "--steps", "200", "train.dtype=bfloat16"),
}
NANOGPT_ON_CPU = {
    "shakespeare_char_cpu": ("--rounds", "8"),
    "shakespeare_char": ("--steps", "1", "--rounds", "5"),
}
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
RESUME = ("checkpoint.interval=8", f"optimizer.lr_decay_iters={RESUME_STEPS}", *QUIET)
RESUME_ON_CPU = ("--config", "tiny", "model.n_layer=2", "train.batch_size=8", *RESUME)
RESUME_ON_GPU = (
    "--config", "gpt2", "train.batch_size=16", WHOLE, "optimizer.warmup_iters=10",
    "train.deterministic=True", *RESUME,
)  # fmt: skip
MEMORY_ON_GPU = {
    "gpt2, 32 rows": ("--config", "gpt2", "train.batch_size=32", WHOLE),
    "gpt2, remat=full": ("--config", "gpt2", "train.batch_size=96", WHOLE, "parallel.remat=full"),
    "gpt2-medium, 16 rows": ("--config", "gpt2-medium", "train.batch_size=16", WHOLE),
}
MEMORY_ON_CPU = {"tiny": ("--config", "tiny", "model.n_embd=256", "train.batch_size=32")}


def machine(commands: Commands) -> Iterator[Row]:
    """Report the doctor's findings and, on NVIDIA GPUs, the driver, clocks and power limit.

    Raises the same errors as `Commands.report`.
    """
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", f"--query-gpu={NVIDIA}", "--format=csv,noheader"]
        yield Row(NVIDIA, subprocess.run(query, capture_output=True, text=True).stdout)
    printed = commands.report("jaxgpt.doctor", "--out", str(commands.folder / "runs"))
    for line in printed.splitlines():
        if line.startswith(("OK ", "WARN ", "FAIL ")):
            name, _, finding = line[5:].partition(": ")
            status = line[:4].strip()
            yield Row(name, finding, note=status, met=False if status == "FAIL" else None)


def gpt2(commands: Commands) -> Iterator[Row]:
    words = ("--steps", "2") if commands.on_gpu else GPT2_ON_CPU
    return speed(commands, "gpt2", words, {"tokens/s": 470_000}, "llm.c: 468,000 on an H100")


def gpt2_xl(commands: Commands) -> Iterator[Row]:
    words = GPT2_XL_ON_GPU if commands.on_gpu else GPT2_XL_ON_CPU
    return speed(commands, "gpt2-xl", words, {"MFU": 0.55}, "llm.c: 49 %")


def speed(
    commands: Commands, config: str, words: Sequence[str], goals: dict[str, float], source: str
) -> Iterator[Row]:
    """Report the result of `bench step` with the preset `config` and the arguments `words`.

    `goals` (row name -> minimum) apply only on a GPU; for rows in %, they are fractions. `source`
    names their origin. Raises the same errors as `Commands.json`.
    """
    found = commands.json("jaxgpt.bench", "step", "--config", config, *words)
    for name, value, unit, note in (
        ("tokens/s", found["tokens_per_sec"], "", found["data"]),
        ("time per step", 1e3 * found["seconds_per_step"]["median"], "ms", ""),
        ("MFU", found["mfu"], "%", "" if found["mfu"] else "peak FLOP/s unknown"),
        ("FLOP/s relative to a large matrix product", found["share_of_matmul"], "%", ""),
        ("attention", found["attention"], "", ""),
    ):
        goal = goals.get(name) if commands.on_gpu else None
        yield row(name, value, unit, note, at_least=goal, source=source)


def nanogpt(commands: Commands) -> Iterator[Row]:
    """Compare speed with nanoGPT's in alternating runs, using the same initial weights and data.

    Raises `Missing` if the comparison scripts or a clone of nanoGPT are missing. Also raises
    whatever `Commands.json` raises.
    """
    script, clone = ROOT / "tests/peers/nanogpt.py", commands.nanogpt
    if not script.exists():
        raise Missing("the comparison scripts; run from a clone of jaxgpt")
    if clone is None or not (clone / "model.py").exists():
        raise Missing("a clone of nanoGPT; pass its path as --nanogpt DIR")
    peer = ("--repo", str(clone), "--torch", commands.torch)
    for config, words in (NANOGPT_ON_GPU if commands.on_gpu else NANOGPT_ON_CPU).items():
        found = commands.json(str(script), *peer, "--config", config, *words)
        note = f"losses differ by {found['loss_difference']:.1g}"
        goal = 1.15 if config == "gpt2" else 1.5
        yield row(config, found["ratio"], "x", note, at_least=goal, source="nanoGPT")


def numerics(commands: Commands) -> Iterator[Row]:
    """Compare bfloat16 with float32, a GPU with the CPU, and attention kernels with XLA's.

    Raises the same errors as `Commands.run` and `Commands.json`.
    """
    words = NUMERICS if commands.on_gpu else (*NUMERICS, *SMALL)
    single, lower = (
        _history(train(commands, dtype, *words, f"train.dtype={dtype}"))
        for dtype in ("float32", "bfloat16")
    )
    note = f"{NUMERICS_STEPS} steps"
    error = _relative_difference(lower, single)
    yield row("losses in bfloat16 against float32", error, note=note, at_most=TOLERANCE)
    if commands.on_gpu:
        out = train(commands, "cpu", *words, "train.dtype=float32", JAX_PLATFORMS="cpu")
        yield Row("losses in float32 against the CPU", _relative_difference(single, _history(out)))
    for name, found in commands.json("jaxgpt.doctor.prove.attention").items():
        forward, gradient, kernel = found
        yield row(f"{name}, forward", forward, note=kernel, at_most=TOLERANCE)
        yield row(f"{name}, gradient", gradient, at_most=TOLERANCE)


def resume(commands: Commands) -> Iterator[Row]:
    """Compare an uninterrupted run with a run that is stopped, resumed, killed and resumed.

    Raises `ValueError` if the runs have logged different numbers of steps. Also raises whatever
    `Commands.run` and `Commands.kill_when` raise.
    """
    words = RESUME_ON_GPU if commands.on_gpu else RESUME_ON_CPU
    end, middle = (f"train.max_iters={n}" for n in (RESUME_STEPS, RESUME_STEPS // 2))
    whole = _history(train(commands, "whole", *words, end))
    out = train(commands, "parts", *words, middle)
    commands.kill_when(
        lambda: len(_history(out)) >= KILL_STEP, "jaxgpt.train", *words, end, "--out", str(out)
    )
    parts = _history(train(commands, "parts", *words, end))
    differing = sum(a != b for a, b in zip(whole, parts, strict=True))
    name = f"steps (of {RESUME_STEPS}) that differ from an uninterrupted run"
    yield row(name, differing, note="loss and gradient norm", at_most=0, source="bitwise")


def memory(commands: Commands) -> Iterator[Row]:
    """Compare the memory that `plan` predicts with the peak memory use of `bench step`.

    Raises the same errors as `Commands.json`.
    """
    for name, words in (MEMORY_ON_GPU if commands.on_gpu else MEMORY_ON_CPU).items():
        words = ("--mesh", "1,1,1", *words)
        found = commands.json("jaxgpt.bench", "step", "--steps", "1", "--synthetic", *words)
        device = find_device(found["device_kind"])
        name_of_device = device.name if device else "cpu"
        plan = commands.json("jaxgpt.plan", "--device", name_of_device, *words)
        planned = plan["memory"]["total"]
        used = found["peak_bytes"]
        note = f"planned {planned / 2**20:,.0f} MiB, in use {used / 2**20:,.0f} MiB"
        goal = 0.10 if commands.on_gpu else None  # on a CPU, the peak includes the whole process
        yield row(f"error of the plan for {name}", abs(planned / used - 1), "%", note, at_most=goal)


def profile(commands: Commands) -> Iterator[Row]:
    """List the most expensive operations of a gpt2 step, with their roofline times if known.

    Raises the same errors as `Commands.json`.
    """
    words = ("--steps", "3") if commands.on_gpu else GPT2_ON_CPU
    trace = ("--profile", str(commands.folder / "trace"))
    step = commands.json("jaxgpt.bench", "step", "--config", "gpt2", *words, *trace)
    found, device = step["profile"], find_device(step["device_kind"])
    for category, seconds in found["categories"].items():
        yield Row(f"share of {category}", seconds / found["device_seconds"], "%")
    for operation in found["operations"]:
        note = f"{operation['category']}, {operation['source']}"
        if operation["work"] and device and device.memory_bandwidth:
            peak = step["matmul_flops_per_sec"]["median"]
            least = Work(**operation["work"]).least_seconds(device.memory_bandwidth, peak)
            note += f"; roofline {1e3 * least:.3g} ms"
        yield Row(operation["name"], 1e3 * operation["seconds"], "ms", note)


def shakespeare(commands: Commands) -> Iterator[Row]:
    """Train a small Shakespeare model: to the end on a GPU, or for 250 steps on a CPU.

    Raises `Missing` if the data has not been prepared. Also raises whatever `Commands.run` raises.
    """
    if not (dataset_directory(DataConfig(dataset="shakespeare_char")) / "train.bin").exists():
        raise Missing("Tiny Shakespeare; run python -m jaxgpt.prepare shakespeare_char")
    gpu = ("--config", "shakespeare_char", "train.dtype=bfloat16")
    cpu = ("--config", "shakespeare_char_cpu", "train.max_iters=250", "train.eval_iters=5")
    out = train(commands, "run", *(gpu if commands.on_gpu else cpu), "train.sample_tokens=0")
    records = read_records(out / "metrics.jsonl", "eval")
    best = min(r["val_loss"] for r in records if r["val_loss"] is not None)
    goal = 1.48 if commands.on_gpu else None
    yield row("best validation loss", best, at_most=goal, source="nanoGPT: 1.47")


CHECKS = {  # name -> (function, time limit in seconds)
    "machine": (machine, 120),
    "speed-gpt2": (gpt2, 180),
    "nanogpt": (nanogpt, 300),
    "speed-gpt2-xl": (gpt2_xl, 240),
    "numerics": (numerics, 180),
    "resume": (resume, 240),
    "memory": (memory, 200),
    "profile": (profile, 150),
    "shakespeare": (shakespeare, 300),
}


def train(commands: Commands, name: str, *words: str, **variables: str) -> Path:
    """Run training to the end; return the run directory.

    `name` is the run directory's name in the check's folder. `words` are the arguments, and
    `variables` are added to the environment. Raises the same errors as `Commands.run`.
    """
    out = commands.folder / name
    commands.run("jaxgpt.train", *words, "--out", str(out), **variables)
    return out


def _history(out: Path) -> list[tuple[float, float]]:
    """Return the loss and the gradient norm of each training step that a run has logged.

    Non-finite numbers are returned as None. Raises `OSError` if metrics.jsonl cannot be read.
    """
    return [(r["loss"], r["grad_norm"]) for r in read_records(out / "metrics.jsonl", "train")]


def _relative_difference(
    found: Sequence[tuple[float, float]], expected: Sequence[tuple[float, float]]
) -> float:
    """Return the largest difference between losses of corresponding steps, relative to `expected`.

    Both have (loss, gradient norm) for each step, and the same number of steps.
    """
    return max(abs(x - y) / abs(y) for (x, _), (y, _) in zip(found, expected, strict=True))
