"""The memory that `plan` predicts for a device, beside the memory that was in use."""

from typing import Any

from jaxgpt.doctor.prove.check import Check
from jaxgpt.perf.hardware import find_device

WHOLE = "train.gradient_accumulation_steps=1"
ON_GPU = {
    "gpt2, 32 rows": ("--config", "gpt2", "train.batch_size=32", WHOLE),
    "gpt2, remat=full": ("--config", "gpt2", "train.batch_size=96", WHOLE, "parallel.remat=full"),
    "gpt2-medium, 16 rows": ("--config", "gpt2-medium", "train.batch_size=16", WHOLE),
    "gpt2-large, remat=dots": (
        "--config", "gpt2-large", "train.batch_size=16", WHOLE, "parallel.remat=dots",
    ),
    "shakespeare_char": (
        "--config", "shakespeare_char", "model.vocab_size=65", "train.dtype=bfloat16",
    ),
}  # fmt: skip
TINY = ("--config", "tiny", "model.n_embd=256", "train.batch_size=64")
LEAST = ("--config", "tiny", "model.n_layer=1", "model.n_embd=16", "train.batch_size=1")
ON_CPU = {
    "tiny": TINY,
    "tiny, remat=full": (*TINY, "parallel.remat=full"),
    "tiny, loss_chunk": (*TINY, "train.loss_chunk=256"),
    "tiny, scanned": (*TINY, "parallel.scan_layers=True"),
    "tiny, 128 rows": (*TINY, "train.batch_size=128"),
}


def memory(check: Check) -> None:
    """Compare the plans of five configurations with what they used."""
    idle, errors = 0, []
    if not check.on_gpu:  # subtract what the process itself uses
        idle = step(check, *LEAST)["peak_bytes"]
    for name, words in (ON_GPU if check.on_gpu else ON_CPU).items():
        found = step(check, *words)
        used = found["peak_bytes"] - idle
        known = find_device(found["device_kind"])
        device = ("--device", known.name if known else "cpu", "--mesh", "1,1,1")
        planned = check.json("jaxgpt.plan", *device, *words)["memory"]["total"]
        errors.append(abs(planned / used - 1))
        note = f"planned {planned / 2**20:,.0f} MiB, in use {used / 2**20:,.0f} MiB"
        check.add(f"{name}: planned / in use", planned / used, "x", note)
    check.add("largest error of a plan", max(errors), at_most=0.10 if check.on_gpu else None)


def step(check: Check, *words: str) -> dict[str, Any]:
    once = ("--steps", "1", "--synthetic", "--mesh", "1,1,1")
    return check.json("jaxgpt.bench", "step", *once, *words)
