"""What an evaluation prints: a table, or a line of JSON."""

import math
from typing import Any

from jaxgpt.evaluate.model import Model
from jaxgpt.evaluate.multiple_choice import ACCURACIES
from jaxgpt.evaluate.split import Loss, Split, sum_losses
from jaxgpt.tracking.jsonl import json_line

ALL = "all"  # corpora together


def about(model: Model) -> dict[str, Any]:
    """Return what was evaluated, and how."""
    trained = model.trained
    return {
        "run": trained.where,
        "step": trained.step,
        "dtype": model.config.train.dtype,
        "mesh": str(model.mesh_shape),
        "batch": model.batch_size,
    }


def loss_record(model: Model, split: Split, losses: dict[str, Loss]) -> dict[str, Any]:
    """Return the losses of a split as JSON has them."""
    whole = _figures(sum_losses(list(losses.values())))
    corpora = {name: _figures(loss) for name, loss in losses.items()}
    windows = {"block_size": model.block_size, "stride": split.windows[0].stride}
    return about(model) | {"split": split.name} | windows | whole | {"corpora": corpora}


def _figures(loss: Loss) -> dict[str, Any]:
    return {
        "loss": loss.mean,
        "perplexity": loss.perplexity,
        "bits_per_byte": loss.bits_per_byte,
        "tokens": loss.n_tokens,
        "bytes": loss.n_bytes,
    }


def choice_record(model: Model, file: str, n: int, found: dict[str, Any]) -> dict[str, Any]:
    """Return the accuracies of multiple choice as JSON has them."""
    return about(model) | {"file": file, "questions": n} | found


def as_json(record: dict[str, Any]) -> str:
    """Return a line of JSON, with null for numbers that are not finite or not known."""
    return json_line(record).rstrip()


def as_table(record: dict[str, Any]) -> str:
    """Return a headline and a table for a person."""
    where = f"{record['run']}, step {record['step']}"
    if "questions" in record:
        lines = [f"{where}: {record['questions']:,} questions of {record['file']}"]
        for name in ACCURACIES:
            error = record[f"{name}_stderr"]
            margin = "" if error is None else f"  ± {error:.2%}"
            lines.append(f"{name:<10}{record[name]:8.2%}{margin}")
        return "\n".join(lines)
    lines = [
        f"{where}: split {record['split']}, rows of {record['block_size']} tokens, "
        f"{record['stride']} apart",
        f"{'corpus':<20}{'tokens':>16}{'nats/token':>14}{'perplexity':>14}{'bits/byte':>12}",
    ]
    corpora = record["corpora"] if len(record["corpora"]) > 1 else {}
    for name, found in {**corpora, ALL: record}.items():
        bits = "-" if found["bits_per_byte"] is None else f"{found['bits_per_byte']:.5f}"
        size = f"{found['perplexity']:,.4f}" if found["perplexity"] < math.inf else "inf"
        numbers = f"{found['tokens']:>16,}{found['loss']:>14.6f}{size:>14}{bits:>12}"
        lines.append(f"{name:<20}{numbers}")
    if record["bytes"] is None:
        lines.append("bits/byte: no tokenizer is known; give data.tokenizer=FOLDER")
    return "\n".join(lines)
