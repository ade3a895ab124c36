"""Runs written for the tests: the records of a real short run, extended to many steps."""

import json
import random

from jaxgpt.tracking.jsonl import json_line
from jaxgpt.tracking.records import (
    CorruptionRecord,
    DamageRecord,
    EvalRecord,
    GoodputRecord,
    SampleRecord,
    SpikeRecord,
    StragglerRecord,
    TrainRecord,
)
from jobs import SMALL, train_here

SPIKE_STEP, SPIKE_LOSS, REWIND_STEP = 7_003, 9.875, 12_345
SAMPLE = "<script>alert('sample')</script> & text"


def short_run(out, *args):
    """Train a few steps, and return the run directory."""
    train_here(*SMALL, "--mesh", "1,1,1", "--out", out, "train.max_iters=4", *args)
    return out


def write_long_run(out, real, n_steps=20_000, seed=0, with_events=True):
    """Write a run of `n_steps` steps with the fields of the `real` run; return its records."""
    rng = random.Random(seed)
    found = [json.loads(line) for line in (real / "metrics.jsonl").read_text().splitlines()]
    last = [r for r in found if r["kind"] == "train"][-1]
    fields = ("kind", "step", "consumed_tokens", "skipped", "skipped_range", "corpora")
    values = {name: value for name, value in last.items() if name not in fields}
    tokens = last["consumed_tokens"] // last["step"]
    rows = [{"row": 3, "loss": 9.9, "corpus": "web", "source": "/data/web", "offset": 8192}]
    records = []
    for step in range(1, n_steps + 1):
        loss = 3 + 3 * 0.999**step + rng.gauss(0, 0.05)
        lr, norm = 1e-3 * (1 - step / n_steps), rng.lognormvariate(0, 0.3)
        new = {"loss": loss, "lr": lr, "grad_norm": norm, "mfu": 0.4 + rng.gauss(0, 0.01)}
        is_skipped = with_events and 12_350 <= step < 12_360
        if with_events and step == SPIKE_STEP:
            new["loss"] = SPIKE_LOSS
        if is_skipped:
            new |= {"loss": None, "grad_norm": None}
        records.append(
            TrainRecord(
                step=step, values={**values, **new}, consumed_tokens=step * tokens,
                skipped=is_skipped, skipped_range=(12_350, 12_359) if is_skipped else None,
            )
        )  # fmt: skip
        if step % 1000 == 0:
            records.append(EvalRecord(step=step, train_loss=loss, val_loss=loss + 0.1))
            records.append(SampleRecord(step=step, text=SAMPLE))
        if with_events and step == SPIKE_STEP:
            numbers = {"loss": SPIKE_LOSS, "grad_norm": 7.5, "median": 3.0, "limit": 4.0}
            records.append(SpikeRecord(step=step, cause="loss", action="log", rows=rows, **numbers))
        if with_events and step == 15_000:
            seconds = {"own": 0.4, "median": 0.1, "data": 0.0, "seconds": 0.4}
            records.append(StragglerRecord(step=step, rank=2, host="n17", **seconds))
            records.append(CorruptionRecord(step=step, found=15_003, devices=["device 3"]))
            records.append(DamageRecord(step=step, path="checkpoints/x", reason="bad checksum"))
    starts = (0, 5_000, 16_000) if with_events else (0,)
    for start, end in zip(starts, (*starts[1:], n_steps), strict=True):
        seconds = {"compile": 10.0, "step": 90.0}
        records.append(
            GoodputRecord(
                step=end, after=start, start=float(start), began=float(start), ended=start + 100.0,
                seconds=seconds, is_last=end == n_steps,
            )
        )  # fmt: skip
    dicts = [record.to_dict() for record in records]
    if with_events:
        dicts.append({
            "kind": "rewind", "step": 12_000, "spike": REWIND_STEP, "cause": "loss", "loss": 8.5,
            "grad_norm": 4.5, "limit": 4.0, "rows": rows, "skip": [12_350, 12_359],
            "dropped": [12_001, REWIND_STEP], "dropped_losses": [[REWIND_STEP - 1, 3.25]],
        })  # fmt: skip
    out.mkdir(parents=True)
    (out / "metrics.jsonl").write_text("".join(map(json_line, dicts)))
    settings = f"train:\n  max_iters: {n_steps}\noptimizer:\n  learning_rate: 0.00{seed + 1}\n"
    (out / "config.yaml").write_text(settings)
    return dicts
