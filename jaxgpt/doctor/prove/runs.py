"""Training runs that are interrupted, killed or disturbed and must not differ."""

import signal
from pathlib import Path

from jaxgpt.doctor.prove.check import Check, CommandFailed
from jaxgpt.tracking.jsonl import read_records

STEPS = 40
SIGNAL_STEP = 12  # the step at which a run is sent a signal
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


def resume(check: Check) -> None:
    """Compare every loss and gradient norm of an interrupted run with an uninterrupted one."""
    whole = train(check, "whole", "checkpoint.interval=20")
    train(check, "parts", "checkpoint.interval=20", f"train.max_iters={STEPS // 2}")
    parts = train(check, "parts", "checkpoint.interval=20")
    check.add("20 + 20 steps against 40", difference(whole, parts), at_most=0, source="bitwise")
    for name, number, status in (
        ("killed and started again", signal.SIGKILL, -signal.SIGKILL),
        ("stopped by SIGTERM and started again", signal.SIGTERM, 75),
    ):
        folder = signal.Signals(number).name
        train_until_signal(check, folder, number, status)
        again = train(check, folder, "checkpoint.interval=5")
        check.add(name, difference(whole, again), at_most=0, source="bitwise")


def spikes(check: Check) -> None:
    """A step that becomes NaN changes nothing; a spike is found, rewound and skipped."""
    few = ("train.max_iters=20", "checkpoint.interval=0")
    hurt = train(check, "nan", *few, "faults.nan_step=10")
    skipped = train(check, "skipped", *few, "--train-range-to-skip", "10", "10")
    apart = difference(hurt, skipped, without=10)
    check.add("step made NaN against step skipped", apart, at_most=1e-5)
    check.run("jaxgpt.train", *SPIKE, "--out", str(check.folder / "spike"))
    records = read_records(check.folder / "spike" / "metrics.jsonl", "rewind")
    check.add("rewinds from random tokens", len(list(records)), at_least=1)


def train(check: Check, name: str, *more: str) -> Path:
    """Train to the end; return the run directory."""
    out = check.folder / name
    check.run("jaxgpt.train", *settings(check), *more, "--out", str(out))
    return out


def settings(check: Check) -> tuple[str, ...]:
    return (*(ON_GPU if check.on_gpu else ON_CPU), f"train.max_iters={STEPS}")


def train_until_signal(check: Check, name: str, number: int, status: int) -> None:
    """Start a run, and send it a signal at step SIGNAL_STEP.

    Raises:
        CommandFailed: if it does not end with `status`.
    """
    out = check.folder / name
    words = (*settings(check), "checkpoint.interval=5", "--out", str(out))
    with check.start("jaxgpt.train", *words) as command:
        check.wait(command, until=lambda: steps_done(out) >= SIGNAL_STEP)
        command.process.send_signal(number)
        ended = check.wait(command)
    if ended != status:
        raise CommandFailed(f"a run that got {name} ended with {ended}, not {status}")


def steps_done(out: Path) -> int:
    path = out / "metrics.jsonl"
    return path.read_text().count('"kind": "train"') if path.exists() else 0


def difference(a: Path, b: Path, without: int | None = None) -> float:
    """Return the largest difference between losses and gradient norms of two runs.

    Raises:
        CommandFailed: if they do not have the same steps.
    """
    values = []
    for out in (a, b):
        records = read_records(out / "metrics.jsonl", "train")
        values.append({r["step"]: (r["loss"], r["grad_norm"]) for r in records})
        values[-1].pop(without, None)
    if values[0].keys() != values[1].keys() or not values[0]:
        raise CommandFailed(f"{a.name} and {b.name} do not have the same steps")
    return max(
        abs(x - y)
        for step in values[0]
        for x, y in zip(values[0][step], values[1][step], strict=True)
    )
