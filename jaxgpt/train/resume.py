"""The checkpoint that a run goes on from: what may differ from it, and what is still to do."""

from pathlib import Path
from typing import Any

from jaxgpt.config import Config, UsageError, should_evaluate
from jaxgpt.data.blend import blend_shares, parse_lines
from jaxgpt.data.dataset import Dataset
from jaxgpt.spikes.policy import METRICS
from jaxgpt.tracking.jsonl import read_records

# What may differ between a checkpoint's model and the model that goes on from it.
_FREE_MODEL_KEYS = {"model.dropout", "model.attention"}
EVAL_RECORDS = ("eval", "sample")  # the kinds of records that train.eval_interval asks for
# Keys of `data` that change what a step computes.
_MASK_KEYS = {"document_mask", "end_of_text"}
# What decides which tokens a step sees: a change is allowed, and said.
_ORDER_KEYS = ("train.batch_size", "train.seed")


def missing_records(config: Config, dataset: Dataset, step: int | None) -> list[str]:
    """Return the kinds of `EVAL_RECORDS` that are due after a step and not in metrics.jsonl."""
    metrics = Path(config.out) / METRICS
    due = list(EVAL_RECORDS)
    if config.train.sample_tokens == 0 or dataset.tokenizer is None:
        due.remove("sample")
    if step is None:
        return due if config.train.eval_at_start else []
    if not metrics.exists() or not should_evaluate(config, step):
        return []
    return [kind for kind in due if all(r["step"] != step for r in read_records(metrics, kind))]


def check_resume(
    config: Config, directory: Path, step: int, meta: dict[str, Any], dataset: Dataset
) -> list[str]:
    """Refuse a checkpoint that the run cannot go on from; return lines about what differs."""
    checkpoint = directory / "checkpoints" / str(step)
    if not config.checkpoint.resume:
        raise UsageError(
            f"checkpoint.resume=False: {checkpoint} exists; give another --out, "
            "or checkpoint.resume=True to go on from it"
        )
    saved, notes, changed = meta["config"], [], []
    for section in ("model", "train", "optimizer", "data", "parallel", "spike"):
        for key, value in config.to_dict()[section].items():
            name, then = f"{section}.{key}", saved[section].get(key)
            if then == value or name == "parallel.mesh":  # of which the log has a line anyway
                continue
            if section == "data" and key not in _MASK_KEYS:
                continue
            if _needs_other_arrays(config, name, (then, value)):
                raise UsageError(
                    f"{name}={value}: {checkpoint} was trained with {name}={then}; use that, or "
                    "another --out"
                )
            if name in _ORDER_KEYS:
                notes.append(
                    f"warning: {name} was {then} and is {value} from step {step + 1} on: "
                    "the order of the data changes"
                )
            else:
                changed.append(f"{name}={value} (was {then})")
    if changed:
        notes.append(f"changed since step {step}: {', '.join(changed)}")
    return _check_data(config, checkpoint, meta, dataset) + notes


def _needs_other_arrays(config: Config, name: str, values: tuple[Any, ...]) -> bool:
    """Return whether two values of a setting have different arrays in their checkpoints."""
    if name == "optimizer.momentum":
        return config.optimizer.name == "sgd" and 0 in values
    is_model = name.startswith("model.") and name not in _FREE_MODEL_KEYS
    return is_model or name == "optimizer.name"


def _check_data(
    config: Config, checkpoint: Path, meta: dict[str, Any], dataset: Dataset
) -> list[str]:
    """Refuse data that is not what a checkpoint was trained on, unless that is accepted."""
    saved, found = source_hashes(meta["data_fingerprint"]), source_hashes(dataset.fingerprints)
    tokenizers = meta["tokenizer"], dataset.tokenizer_meta
    source = dataset.sources[0].entry
    if len(saved) != len(found):
        what = f"{checkpoint} was trained on {len(saved)} sources, not {len(found)}"
    elif saved != found:
        changed = next(i for i in range(len(saved)) if saved[i] != found[i])
        source = dataset.sources[changed].entry
        what = f"{source.path} does not hold the tokens that {checkpoint} was trained on"
    elif None not in tokenizers and tokenizers[0] != tokenizers[1]:
        what = f"the tokenizer is not the one that {checkpoint} was trained with"
    else:
        blends = meta["config"]["data"].get("blend", []), config.data.blend
        if len({blend_shares(parse_lines(lines, "data.blend")) for lines in blends}) > 1:
            words = "weights or corpora of data.blend have changed"
            return [f"warning: the {words}: so does the order of the data"]
        return []
    if not config.data.accept_changes:
        raise UsageError(
            f"{source.key}: {what}; bring back what it was, give another --out, or accept it with "
            "data.accept_changes=True"
        )
    return [f"warning: {what}; accepted by data.accept_changes"]


def source_hashes(fingerprints: list[list[str]]) -> list[str]:
    """Return the hash of every source, from `Dataset.fingerprints` or a checkpoint."""
    return [hash_ for _, hash_ in fingerprints]
