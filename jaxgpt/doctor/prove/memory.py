"""What `plan` says of a device's memory, beside what was in use."""

from typing import Any

from jaxgpt.doctor.prove.stage import Stage, StageFailure

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
LARGEST = ("--config", "gpt2", WHOLE)
MULTIPLE = 8  # rows
TRIES = 4


def memory(stage: Stage) -> None:
    """Compare plans of five configurations with what they took, then the largest batch."""
    device, idle, errors = "cpu", 0, []
    if not stage.on_gpu:  # a process has memory of its own: count what it has beyond the least
        idle = step(stage, *LEAST)["peak_bytes"]
    for name, words in (ON_GPU if stage.on_gpu else ON_CPU).items():
        found = step(stage, *words)
        taken = found["peak_bytes"] - idle
        device = device_name(found["device_kind"])
        planned = plan(stage, device, *words)["memory"]["total"]
        errors.append(abs(planned / taken - 1))
        note = f"planned {planned / 2**20:,.0f} MiB, in use {taken / 2**20:,.0f} MiB"
        stage.add(f"{name}: planned / in use", planned / taken, "x", note)
    stage.add("largest error of a plan", max(errors))
    if stage.on_gpu:
        largest_batch(stage, device)


def largest_batch(stage: Stage, device: str) -> None:
    """Find the most rows of gpt2 that fit, by the plan and by trying."""
    plans = [plan(stage, device, *LARGEST, f"train.batch_size={n}")["memory"] for n in (32, 64)]
    each = (plans[1]["total"] - plans[0]["total"]) / 32
    planned = int(32 + (plans[0]["capacity"] - plans[0]["total"]) / each) // MULTIPLE * MULTIPLE
    stage.add("largest batch of gpt2 as planned", planned, "rows")
    found, change = 0, max(MULTIPLE, planned // 20 // MULTIPLE * MULTIPLE)
    rows = planned
    for _ in range(TRIES):
        if fits(stage, rows):
            found, rows = max(found, rows), rows + change
        elif found:
            break
        else:
            rows -= change
    stage.add("largest batch of gpt2 as found", found, "rows", f"in steps of {change}")


def fits(stage: Stage, rows: int) -> bool:
    try:
        step(stage, *LARGEST, f"train.batch_size={rows}")
    except StageFailure:
        return False
    return True


def step(stage: Stage, *words: str) -> dict[str, Any]:
    return stage.json("bench", "step", "--steps", "1", "--synthetic", "--mesh", "1,1,1", *words)


def plan(stage: Stage, device: str, *words: str) -> dict[str, Any]:
    return stage.json("plan", "--device", device, "--mesh", "1,1,1", *words)


def device_name(kind: str) -> str:
    """Return the name by which `plan` knows a device."""
    from jaxgpt.perf.hardware import find_device

    found = find_device(kind)
    return "cpu" if found is None else found.name
