"""Checks on the checkpoint that a run resumes from, and settings that depend on it."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxgpt.checkpoint.metadata import SECTIONS, WEIGHTS_ONLY, newest_valid, valid_checkpoints
from jaxgpt.config import (
    Config,
    UsageError,
    config_from_dict,
    should_evaluate,
    skip_ranges,
)
from jaxgpt.data.batch_sizes import BatchSizes
from jaxgpt.data.blend import blend_shares, consumed_by_corpus, parse_lines
from jaxgpt.data.dataset import Dataset
from jaxgpt.data.tokenizers import load_tokenizer
from jaxgpt.optim.schedule import learning_rate
from jaxgpt.spikes.skip import SkipRanges, remaining_ranges
from jaxgpt.tracking.jsonl import METRICS, read_records

# `model` keys that may change when a run resumes or starts from existing weights.
FREE_MODEL_KEYS = {"model.dropout", "model.attention"}
EVAL_RECORDS = ("eval", "sample")  # kinds of records logged every train.eval_interval steps
# `data` keys that change what a step computes.
_MASK_KEYS = {"document_mask", "end_of_text"}
# Keys whose changes are not reported. The mesh and the batch size have their own log lines, a
# resumed run no longer uses its initial weights, checkpoint.resume concerns one start, and the
# other keys change only the log.
_NOT_REPORTED = (
    "parallel.mesh", "train.init_from", "train.log_columns", "train.log_all_ranks",
    "train.verbose", "checkpoint.resume",
)  # fmt: skip


def missing_records(config: Config, dataset: Dataset, step: int | None) -> list[str]:
    """Return the `EVAL_RECORDS` that are due after `step` but missing from metrics.jsonl.

    `config.out` must be set. `step` is the checkpoint to resume from, or None for a new run. In a
    new run, records are due if train.eval_at_start is set, and metrics.jsonl is ignored. If a
    resumed run has no metrics.jsonl, nothing counts as missing.
    """
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
    """Check that a run can resume from a checkpoint; return log lines about changes.

    `step` is the step of the checkpoint, and `meta` its JSON metadata. Raises `UsageError` if the
    run cannot resume from this checkpoint.
    """
    checkpoint = directory / "checkpoints" / str(step)
    if meta.get(WEIGHTS_ONLY):
        raise UsageError(
            f"out={directory}: contains weights written by jaxgpt.convert, not a run; to train "
            f"from them, give train.init_from={directory} and another run directory"
        )
    if not config.checkpoint.resume:
        raise UsageError(
            f"checkpoint.resume=False: {checkpoint} exists; give another run "
            "directory, or checkpoint.resume=True to continue from it"
        )
    saved, notes, changed = meta["config"], [], []
    # A run that predates a key behaves as if the key had its default value.
    defaults = Config().to_dict()
    for section in SECTIONS:
        for key, value in config.to_dict()[section].items():
            name, then = f"{section}.{key}", saved[section].get(key, defaults[section][key])
            if then == value or name in _NOT_REPORTED:
                continue
            if section == "data" and key not in _MASK_KEYS:
                continue
            if _is_fixed(config, name, (then, value)):
                raise UsageError(
                    f"{name}={value}: {checkpoint} was trained with {name}={then}; use that value, "
                    "or another run directory"
                )
            if name == "train.seed":
                notes.append(
                    f"warning: {name} was {then} and is {value} from step {step + 1} on, which "
                    "changes the order of the data"
                )
            else:
                changed.append(f"{name}={value} (was {then})")
    if changed:
        notes.append(f"changed since step {step}: {', '.join(changed)}")
    return _check_data(config, checkpoint, meta, dataset) + notes


def _is_fixed(config: Config, name: str, values: tuple[Any, ...]) -> bool:
    """Return whether a setting must stay the same when a run resumes.

    `values` has the old and the new value.
    """
    if name == "optimizer.momentum":
        return config.optimizer.name == "sgd" and 0 in values
    is_model = name.startswith("model.") and name not in FREE_MODEL_KEYS
    return is_model or name == "optimizer.name"


def _check_data(
    config: Config, checkpoint: Path, meta: dict[str, Any], dataset: Dataset
) -> list[str]:
    """Compare the data with a checkpoint's training data; return log lines.

    Raises `UsageError` if the sources, their tokens or the tokenizer differ, unless
    data.accept_changes is set. A change of data.blend is only logged.
    """
    saved, found = source_hashes(meta["data_fingerprint"]), source_hashes(dataset.fingerprints)
    tokenizers = meta["tokenizer"], dataset.tokenizer_meta
    source = dataset.sources[0].entry
    if len(saved) != len(found):
        what = f"{checkpoint} was trained on {len(saved)} sources, not {len(found)}"
    elif saved != found:
        changed = next(i for i in range(len(saved)) if saved[i] != found[i])
        source = dataset.sources[changed].entry
        what = f"{source.path} has different tokens from the training data of {checkpoint}"
    elif None not in tokenizers and tokenizers[0] != tokenizers[1]:
        what = f"the tokenizer is not the one that {checkpoint} was trained with"
    else:
        blends = meta["config"]["data"].get("blend", []), config.data.blend
        if len({blend_shares(parse_lines(lines, "data.blend")) for lines in blends}) > 1:
            words = "weights or corpora of data.blend have changed"
            effects = _blend_effects(meta, dataset)
            return [f"warning: the {words}, which changes the order of the data{effects}"]
        return []
    if not config.data.accept_changes:
        raise UsageError(
            f"{source.key}: {what}; restore the original data, give another run directory, or "
            "accept the change with data.accept_changes=True"
        )
    return [f"warning: {what}; accepted by data.accept_changes"]


def _blend_effects(meta: dict[str, Any], dataset: Dataset) -> str:
    """Return how many sequences of each corpus a new data.blend repeats or leaves out.

    With the new weights, a corpus continues where it would be if they had applied from step 1. The
    result is appended to a warning. It is empty if the names of the corpora have changed. Weights
    of sources within a corpus are not compared.
    """
    if not (lines := meta["config"]["data"].get("blend", [])):
        return ""  # there is only one source
    consumed = BatchSizes(meta["batch_sizes"]).consumed(meta["step"])
    then = consumed_by_corpus(parse_lines(lines, "data.blend"), consumed)
    now = consumed_by_corpus([source.entry for source in dataset.sources], consumed)
    out = []
    for name in now if now.keys() == then.keys() else ():
        if n := now[name] - then[name]:
            out.append(f"{abs(n):,} sequences of {name} are {'left out' if n > 0 else 'repeated'}")
    return "".join(f"; {effect}" for effect in out)


def rate_after_decay(config: Config, resume_step: int | None) -> list[str]:
    """Return a log line if training continues after the learning-rate decay ends, else no lines.

    The decay ends at optimizer.lr_decay_iters or, if that is not after warm-up, one step after it.
    The constant schedule has no decay, so there is no line.

    Args:
        resume_step: step of the checkpoint to resume from; None for a new run.
    """
    optimizer, end = config.optimizer, config.train.max_iters
    last = max(optimizer.lr_decay_iters, optimizer.warmup_iters + 1)
    if optimizer.schedule == "constant" or end <= last:
        return []
    longer = replace(optimizer, lr_decay_iters=end)
    then = ""
    if resume_step is not None:
        step = resume_step + 1
        then = f", which makes it {learning_rate(longer, step):g} at step {step}"
    return [
        f"train.max_iters={end} exceeds optimizer.lr_decay_iters={optimizer.lr_decay_iters}: the "
        "learning rate is "
        f"{learning_rate(optimizer, end):g} from step {last} on; to let it decay until the end, "
        f"set optimizer.lr_decay_iters={end}{then}"
    ]


def rate_in_warmup(config: Config) -> list[str]:
    """Return a log line if fine-tuning ends during warm-up, else no lines."""
    optimizer, end = config.optimizer, config.train.max_iters
    if config.train.init_from is None or end >= optimizer.warmup_iters:
        return []
    return [
        f"train.max_iters={end} is less than optimizer.warmup_iters={optimizer.warmup_iters}: the "
        f"learning rate reaches only {learning_rate(optimizer, end):g}; to reach "
        f"{optimizer.learning_rate:g}, lower optimizer.warmup_iters"
    ]


def source_hashes(fingerprints: list[list[str]]) -> list[str]:
    """Return the hash of every source, from `Dataset.fingerprints` or from a checkpoint."""
    return [hash_ for _, hash_ in fingerprints]


def saved_settings(directory: Path) -> dict[str, Any] | None:
    """Return the configuration in a run's newest undamaged checkpoint, for `parse_args`.

    Return None if there is no such checkpoint.
    """
    return newest_valid(directory)[1].get("config")


def with_moved_tokenizer(config: Config, directory: Path) -> Config:
    """Return the configuration, with data.tokenizer replaced if a renamed run needs this.

    A run's data.tokenizer may be the run directory itself. If this path no longer exists, it is
    replaced with `directory`, provided that a checkpoint in `directory` has the same data.tokenizer
    and was trained with the tokenizer in `directory`.
    """
    given = config.data.tokenizer
    if given is None or given == "byte" or os.path.exists(given):
        return config
    for meta in valid_checkpoints(directory).values():
        file = (meta["tokenizer"] or {}).get("file")
        is_from_run = meta["config"]["data"].get("tokenizer") == given  # not from this command
        if is_from_run and file is not None and (directory / file).is_file():
            if load_tokenizer(directory).to_meta() == meta["tokenizer"]:
                return config.replace(data__tokenizer=str(directory.absolute()))
    return config


def batch_sizes(directory: Path, config: Config) -> BatchSizes:
    """Return the batch sizes up to the newest checkpoint, followed by train.batch_size.

    Checkpoints with damaged JSON are ignored.
    """
    return resumed_batch_sizes(*newest_valid(directory), config)


def resumed_batch_sizes(step: int | None, meta: dict[str, Any], config: Config) -> BatchSizes:
    """Return the batch sizes up to a checkpoint, followed by train.batch_size.

    `step` and `meta` are the checkpoint's step and JSON, or None and {} for a new run.
    """
    before = BatchSizes(meta.get("batch_sizes", ()))
    return before.change_after(step or 0, config.train.batch_size)


def ranges_to_skip(
    asked: Sequence[tuple[int, int]],
    rewound: Sequence[tuple[int, int]],
    step: int | None,
    meta: dict[str, Any],
) -> tuple[tuple[int, ...], list[str]]:
    """Return all ranges that a run skips, and warnings about ranges in `asked`.

    The ranges include those skipped before the checkpoint. They have the format of
    train_range_to_skip: first, last, first, last, ... A range in `asked` causes a warning if some
    of its steps were trained before the checkpoint was saved.

    Args:
        asked: the ranges in train_range_to_skip.
        rewound: the ranges that the run's rewinds skip.
        step: the step of the checkpoint; None at the start of a run.
        meta: JSON metadata of the checkpoint; not used at the start of a run.
    """
    if step is None:
        return SkipRanges([*asked, *rewound]).flat(), []
    saved = skip_ranges(config_from_dict(meta["config"], f"checkpoint {step}"))
    then = [(first, min(last, step)) for first, last in saved if first <= step]
    ranges, warnings = remaining_ranges(asked, SkipRanges([*then, *rewound]), step)
    return SkipRanges([*ranges, *then, *rewound]).flat(), warnings
