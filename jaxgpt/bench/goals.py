"""The speeds that jaxgpt sets itself, measured here: each by a command of its own, in a table."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxgpt.bench.alone import of_its_own, refuse_launcher
from jaxgpt.bench.nanogpt import refuse_what_is_not_there
from jaxgpt.bench.progress import tell
from jaxgpt.bench.scratch import scratch_folder
from jaxgpt.cluster.hardware import accelerator_expected
from jaxgpt.cluster.process_group import ProcessGroup
from jaxgpt.config import UsageError, names_config, parse_args
from jaxgpt.tracking.jsonl import read_records


class Goal(NamedTuple):
    """What is measured, by which command, and what it should be."""

    config: str
    command: tuple[str, ...]
    """After `python -m jaxgpt.`; the settings come behind it."""
    settings: tuple[str, ...]
    against: str
    quantity: str
    """In the command's JSON; `val_loss` is the best of a run."""
    bound: float
    at_most: bool = False
    losses_within: float = 0.2
    """Beside nanoGPT: in nats, of the same steps; there may be dropout or bfloat16 between them."""

    @property
    def words(self) -> tuple[str, ...]:
        return (*self.command, "--config", self.config, *self.settings)

    def met(self, value: float | None) -> bool | None:
        """None where there is no value."""
        if value is None:
            return None
        return value <= self.bound if self.at_most else value >= self.bound

    @property
    def beside_nanogpt(self) -> bool:
        return "nanogpt" in self.command


NANOGPT, STEP = ("bench", "nanogpt"), ("bench", "step")
COMPILED, BFLOAT16 = "nanoGPT, torch.compile", ("train.dtype=bfloat16",)
# On GPUs: one H100 or H200. llm.c's figures are its authors', of one of eight H100s.
GOALS = {
    "cpu": (
        Goal(
            "shakespeare_char_cpu",
            NANOGPT,
            (),
            "nanoGPT, eager",
            "ratio",
            1.2,
            losses_within=1e-4,
        ),
        Goal(
            "shakespeare_char",
            (*NANOGPT, "--steps", "1", "--rounds", "5"),
            (),
            "nanoGPT, eager",
            "ratio",
            1.0,
        ),
    ),
    "gpu": (
        Goal("gpt2", (*STEP, "--steps", "5"), (), "llm.c: 468,000", "tokens_per_sec", 470_000),
        Goal(
            "gpt2",
            (*NANOGPT, "--compile", "--steps", "2"),
            ("train.gradient_accumulation_steps=20",),
            COMPILED,
            "ratio",
            1.15,
        ),
        Goal(
            "gpt2-xl",
            STEP,
            ("train.gradient_accumulation_steps=40",),
            "llm.c: 49 %",
            "mfu",
            0.55,
        ),
        Goal(
            "shakespeare_char",
            (*NANOGPT, "--compile", "--steps", "200"),  # of a few milliseconds each
            BFLOAT16,
            COMPILED,
            "ratio",
            1.5,
        ),
        Goal("shakespeare_char", ("train",), BFLOAT16, "nanoGPT: 1.47", "val_loss", 1.48, True),
    ),
}
SHOWN = {"tokens_per_sec": "{:,.0f} tokens/s", "ratio": "{:.3f} x", "mfu": "mfu {:.2%}"}


def measure(
    settings: Sequence[str], only: str | None, nanogpt: Path | None, torch: str | None
) -> dict[str, Any]:
    """Runs the commands, one after the other.

    Args:
        settings: as for jaxgpt.train, for all of them.
        only: the configuration whose goals are measured; None measures all.
        nanogpt: a clone of nanoGPT; None leaves out what is compared with it.
        torch: a Python with torch, for the same.

    Returns:
        `goals`, one after the other, with `value` and `met`; where these are None, `error` says
        why. `device_kind` is there where the command tells it.

    Raises:
        UsageError: before anything starts, if a setting is wrong, or there is nothing to measure.
    """
    device = "gpu" if accelerator_expected() else "cpu"
    goals = [goal for goal in GOALS[device] if only in (None, goal.config)]
    if not goals:
        known = ", ".join(dict.fromkeys(goal.config for goal in GOALS[device]))
        raise UsageError(f"--only={only}: has no goal on a {device}; give one of {known}")
    if names_config(settings):
        raise UsageError("--config: the goals have configurations of their own; give --only NAME")
    for goal in goals:
        parse_args([*goal.words[len(goal.command) :], *settings])
    beside = ("--nanogpt", str(nanogpt), "--torch", str(torch)) if nanogpt and torch else ()
    if not beside and (nanogpt or torch or all(goal.beside_nanogpt for goal in goals)):
        raise UsageError(
            "bench goals: nanoGPT is what these speeds are set against; give a clone of it with "
            "--nanogpt and a Python with torch with --torch"
        )
    refuse_launcher("goals", "run it without the launcher")
    if nanogpt and torch:
        refuse_what_is_not_there(nanogpt, torch)
    cluster, rows = ProcessGroup("bench"), []
    with scratch_folder(cluster) as folder:
        for number, goal in enumerate(goals, start=1):
            words = (*goal.words, *settings)
            tell(cluster, f"{number} of {len(goals)}: {' '.join(words)}")
            if goal.beside_nanogpt and not beside:
                found = {"value": None, "error": "give --nanogpt and --torch"}
            else:
                more = beside if goal.beside_nanogpt else ()
                found = result(goal, (*words, *more), folder / str(number))
            row = {"words": " ".join(words)} | found | {"met": goal.met(found["value"])}
            rows.append(goal._asdict() | row)
            tell(cluster, shown(rows[-1]))
    return {"device": device, "goals": rows}


def result(goal: Goal, words: Sequence[str], out: Path) -> dict[str, Any]:
    """What a command found: `value`, or None and what it said of that as `error`.

    Args:
        words: after `python -m jaxgpt.`.
        out: a folder for a run.
    """
    module, *rest = words
    trains = module == "train"
    rest += ["--out", str(out)] if trains else ["--json"]
    ended = subprocess.run(
        [sys.executable, "-m", f"jaxgpt.{module}", *rest],
        env=of_its_own(),
        capture_output=True,
        text=True,
        errors="replace",
    )
    if ended.returncode != 0:
        said = [line.strip() for line in ended.stderr.splitlines() if line.strip()]
        errors = [line.removeprefix("error: ") for line in said if line.startswith("error: ")]
        otherwise = f"ended with status {ended.returncode}: {said[-1] if said else 'no word'}"
        return {"value": None, "error": errors[0] if errors else otherwise}
    if trains:
        losses = [record["val_loss"] for record in read_records(out / "metrics.jsonl", "eval")]
        finite = [loss for loss in losses if loss is not None]
        return {"value": min(finite)} if finite else {"value": None, "error": "no loss was finite"}
    found = json.loads(ended.stdout.splitlines()[-1])
    facts = {"device_kind": found["device_kind"], "data": found["data"]}
    if goal.quantity != "ratio" and found["devices"] > 1:
        several = f"{found['devices']} devices; for one set CUDA_VISIBLE_DEVICES=0"
        return facts | {"value": None, "error": several}
    if goal.beside_nanogpt:
        facts["loss_difference"] = difference = found["loss_difference"]
        if not difference <= goal.losses_within:  # also where it is not a number
            return facts | {"value": None, "error": f"losses differ by {difference:.2g}"}
    value = found[goal.quantity]
    unknown = {} if value is not None else {"error": "the device's peak is not known"}
    return facts | unknown | {"value": value}


def describe(found: dict[str, Any]) -> str:
    """What `measure` found: a table in Markdown."""
    on = "one H100 or H200" if found["device"] == "gpu" else "this machine's CPU"
    kinds = dict.fromkeys(row["device_kind"] for row in found["goals"] if "device_kind" in row)
    return "\n".join(
        [
            f"goals: for {on}, measured on {', '.join(kinds) or '-'}",
            "| `python -m jaxgpt.` | against | goal | here | met |",
            "|---|---|---|---|---|",
            *map(shown, found["goals"]),
        ]
    )


def shown(row: dict[str, Any]) -> str:
    """A line of the table."""
    form = SHOWN.get(row["quantity"], "{:.3f}")
    here = f"- ({row['error']})" if row["value"] is None else form.format(row["value"])
    if row.get("data", "").startswith("random tokens"):
        here += ", on random tokens"
    if "loss_difference" in row and row["value"] is not None:
        here += f", losses to {row['loss_difference']:.1g}"
    bound = ("at most " if row["at_most"] else "at least ") + form.format(row["bound"])
    met = {None: "-", True: "yes", False: "no"}[row["met"]]
    cells = (f"`{row['words']}`", row["against"], bound, here, met)
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"
