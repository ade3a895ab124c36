"""Runs of the trainer that are stopped, killed, spoiled, and must not differ for it."""

import signal
import time
from pathlib import Path

from jaxgpt.doctor.prove.stage import Stage, StageFailure
from jaxgpt.tracking.jsonl import read_records

STEPS = 40
UNTIL = 12  # the step at which a run is ended from outside
QUIET = (
    "train.eval_interval=0", "train.sample_tokens=0", "train.log_interval=1",
    f"optimizer.lr_decay_iters={STEPS}", "data.dataset=python",
)  # fmt: skip
ON_CPU = ("--config", "tiny", "model.n_layer=2", "train.batch_size=8", *QUIET)
ON_GPU = (
    "--config", "gpt2", "train.batch_size=16", "train.gradient_accumulation_steps=1",
    "optimizer.warmup_iters=10", "train.deterministic=True", *QUIET,
)  # fmt: skip
SPIKE = (
    "--config", "tiny", "data.dataset=python", "model.n_layer=1", "model.n_embd=32",
    "train.max_iters=50", "train.eval_iters=1", "train.sample_tokens=0",
    "optimizer.learning_rate=0.01", "optimizer.warmup_iters=2", "checkpoint.interval=10",
    "checkpoint.keep=5", "spike.action=rewind", "spike.window=16", "spike.rewind_margin=10",
    "spike.skip_before=2", "spike.skip_after=6", "--faults.random_tokens", "36", "38",
)  # fmt: skip


def resume(stage: Stage) -> None:
    """Compare every loss and gradient norm of a run that was stopped with one that was not."""
    whole = train(stage, "whole", "checkpoint.interval=20")
    train(stage, "parts", "checkpoint.interval=20", f"train.max_iters={STEPS // 2}")
    train(stage, "parts", "checkpoint.interval=20")
    stage.add("20 + 20 steps against 40", difference(whole, stage.folder / "parts"))
    for name, number, status in (
        ("killed and started again", signal.SIGKILL, -signal.SIGKILL),
        ("stopped by SIGTERM and started again", signal.SIGTERM, 75),
    ):
        out = stage.folder / signal.Signals(number).name
        end_at(stage, out, number, status)
        train(stage, out.name, "checkpoint.interval=5")
        stage.add(name, difference(whole, out))


def spikes(stage: Stage) -> None:
    """A step that is made NaN changes nothing; a spike is found, rewound and skipped."""
    few = ("train.max_iters=20", "checkpoint.interval=0")
    hurt = train(stage, "nan", *few, "faults.nan_step=10")
    skipped = train(stage, "skipped", *few, "--train-range-to-skip", "10", "10")
    stage.add("step made NaN against step skipped", difference(hurt, skipped, without=10))
    stage.run("train", *SPIKE, "--out", str(stage.folder / "spike"))
    records = read_records(stage.folder / "spike" / "metrics.jsonl", "rewind")
    stage.add("rewinds from random tokens", len(list(records)))


def settings(stage: Stage) -> tuple[str, ...]:
    return ON_GPU if stage.on_gpu else ON_CPU


def train(stage: Stage, name: str, *more: str) -> Path:
    """Train to the end; return the run directory."""
    out = stage.folder / name
    words = (*settings(stage), f"train.max_iters={STEPS}", *more)
    stage.run("train", *words, "--out", str(out))
    return out


def end_at(stage: Stage, out: Path, number: int, status: int) -> None:
    """Start a run, and send it a signal at step UNTIL.

    Raises:
        StageFailure: if it does not end with `status`.
    """
    words = (*settings(stage), f"train.max_iters={STEPS}", "checkpoint.interval=5")
    process = stage.start("train", *words, "--out", str(out))
    while process.poll() is None and steps_done(out) < UNTIL:
        time.sleep(0.02)
    process.send_signal(number)
    ended = process.wait()
    if ended != status:
        raise StageFailure(f"a run that got {out.name} ended with {ended}, not {status}")


def steps_done(out: Path) -> int:
    path = out / "metrics.jsonl"
    return path.read_text().count('"kind": "train"') if path.exists() else 0


def difference(a: Path, b: Path, without: int | None = None) -> float:
    """Return the largest difference of losses and gradient norms of two runs.

    Raises:
        StageFailure: if they do not have the same steps.
    """
    values = []
    for out in (a, b):
        records = read_records(out / "metrics.jsonl", "train")
        values.append({r["step"]: (r["loss"], r["grad_norm"]) for r in records})
        values[-1].pop(without, None)
    if values[0].keys() != values[1].keys() or not values[0]:
        raise StageFailure(f"{a.name} and {b.name} do not have the same steps")
    return max(
        abs(x - y)
        for step in values[0]
        for x, y in zip(values[0][step], values[1][step], strict=True)
    )
