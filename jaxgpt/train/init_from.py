"""Initial weights of a run (train.init_from)."""

import shutil
from pathlib import Path
from typing import Any, NamedTuple

from jaxgpt.checkpoint.metadata import newest_checkpoint, newest_valid
from jaxgpt.config import Config, ModelConfig, UsageError, config_from_dict, in_words
from jaxgpt.convert import TRANSFORMERS, convert_in_subprocess, transformers_folder
from jaxgpt.convert.families import COMPANIONS, read_model
from jaxgpt.data.dataset import Dataset
from jaxgpt.data.tokenizers import (
    SENTENCEPIECE,
    TOKENIZER_FILE,
    ByteTokenizer,
    FileTokenizer,
    same_tokens,
    tokenizer_from_meta,
)
from jaxgpt.train.resume import FREE_MODEL_KEYS

# `model` options that may differ from those of the initial weights, because they do not affect any
# parameter array.
_WITHOUT_ARRAYS = {
    "norm_eps", "rope_theta", "rope_scaling", "local_rope_theta", "layers", "sliding_window",
    "logit_softcap", "scale_embeddings", "query_pre_attn_scalar",
}  # fmt: skip
CONVERTED_FOLDER = "init_from"  # folder for converted weights, in the run directory


class InitialWeights(NamedTuple):
    """Initial weights that are ready to load."""

    config: Config  # of the run, as changed by `prepare_weights`
    folder: Path  # absolute
    step: int
    notes: list[str]  # lines for the log


def initial_model(init_from: str, out: str | None) -> dict[str, Any]:
    """Return the model options that train.init_from implies, for `parse_args`.

    If the run directory `out` has undamaged checkpoints, return the options of the newest one
    instead, because a resumed run no longer uses its initial weights. The keys have no `model.`
    prefix. The options exclude model.dropout and model.attention. Raises `UsageError` if the
    options cannot be read.
    """
    saved = newest_valid(Path(out))[1] if out else {}
    settings = saved["config"] if saved else Config(model=_saved_model(init_from)).to_dict()
    return {
        key: value
        for key, value in settings["model"].items()
        if f"model.{key}" not in FREE_MODEL_KEYS
    }


def _saved_model(init_from: str) -> ModelConfig:
    if init_from.startswith(TRANSFORMERS):
        folder = transformers_folder(init_from, "train.init_from=")
        try:
            if not folder.is_dir():
                raise UsageError(
                    "no such folder; download the model, and give the folder that contains its "
                    "config.json"
                )
            return read_model(folder)
        except OSError as error:  # for example, a parent folder denies search permission
            words = f"cannot be read ({in_words(error)})"
            raise UsageError(f"train.init_from={init_from}: {words}") from None
        except UsageError as error:
            raise UsageError(f"train.init_from={init_from}: {error}") from None
    _, meta = newest_checkpoint(Path(init_from), f"train.init_from={init_from}")
    return config_from_dict(meta["config"], init_from).model


def prepare_weights(config: Config, dataset: Dataset, directory: Path) -> InitialWeights:
    """Prepare the initial weights of a run that sets train.init_from.

    `directory` is the run directory. Weights in Hugging Face's format are converted and written to
    the run directory. If the weights have a tokenizer, their `COMPANIONS` are copied to the run
    directory. In the returned config, the path in train.init_from is absolute. If the weights have
    a tokenizer file but the data has no tokenizer, data.tokenizer is also set.
    """
    given = str(config.train.init_from)
    key, saved = f"train.init_from={given}", _saved_model(given)
    changed = _check_model(config.model, saved, key)
    if given.startswith(TRANSFORMERS):
        source = transformers_folder(given, "train.init_from=").absolute()
        config = config.replace(train__init_from=f"{TRANSFORMERS}{source}")
        folder = (directory / CONVERTED_FOLDER).absolute()
        convert_in_subprocess(source, folder, key)
    else:
        folder = Path(given).absolute()
        config = config.replace(train__init_from=str(folder))
    step, meta = newest_checkpoint(folder, key)
    origin = f", from {meta['source']}" if "source" in meta else ""
    notes = [f"weights: step {step} of {folder}{origin}"]
    config, more = _share_tokenizer(config, dataset, directory, folder, meta)
    return InitialWeights(config, folder, step, notes + changed + more)


def _check_model(model: ModelConfig, saved: ModelConfig, key: str) -> list[str]:
    """Return a log line if any options differ from those of the weights.

    Raises `UsageError` if such an option affects the parameter arrays.
    """
    changed = []
    for name, then in vars(saved).items():
        value = getattr(model, name)
        is_same = getattr(model.explicit, name) == getattr(saved.explicit, name)
        if value == then or is_same or f"model.{name}" in FREE_MODEL_KEYS:
            continue
        if name == "block_size":
            if saved.n_positions and value > saved.n_positions:
                raise UsageError(
                    f"model.block_size={value}: {key} has {saved.n_positions} learned position "
                    "embeddings; choose at most that many"
                )
        elif name not in _WITHOUT_ARRAYS:
            raise UsageError(
                f"model.{name}={value}: the weights of {key} have model.{name}={then}; use that "
                "value, or leave the key out"
            )
        changed.append(f"model.{name}={value} (was {then})")
    return [f"changed from the weights: {', '.join(changed)}"] if changed else []


def _share_tokenizer(
    config: Config, dataset: Dataset, directory: Path, folder: Path, meta: dict[str, Any]
) -> tuple[Config, list[str]]:
    """Check that the data and the weights have the same tokenizer; return the config and log lines.

    The `COMPANIONS` of the weights are copied into the run directory. If the data has no tokenizer
    but the weights have a tokenizer file, the run uses this file. If one of the tokenizers is
    unknown, the log lines include a warning. Raises `UsageError` if the tokenizers differ, unless
    data.accept_changes is set.
    """
    key, name = f"train.init_from={config.train.init_from}", dataset.sources[0].entry.key
    if meta["tokenizer"] is None:
        return config, [f"warning: {key} has no tokenizer; assuming the tokenizer of {name}"]
    tokenizer = tokenizer_from_meta(meta["tokenizer"], folder)
    for companion in COMPANIONS:
        if (folder / companion).is_file():
            shutil.copyfile(folder / companion, directory / companion)
    if dataset.tokenizer is None:
        if not isinstance(tokenizer, FileTokenizer):
            return config, [f"warning: {name} has no tokenizer; assuming the tokenizer of {key}"]
        tokenizer.save(directory)
        return config.replace(data__tokenizer=str(directory.absolute())), []
    if same_tokens(tokenizer, dataset.tokenizer):
        return config, []
    what = f"{name} has a different tokenizer from the weights of {key}"
    if config.data.accept_changes:
        return config, [f"warning: {what}; accepted by data.accept_changes"]
    if isinstance(tokenizer, ByteTokenizer):
        given = "byte"
    elif any((folder / file).is_file() for file in (TOKENIZER_FILE, SENTENCEPIECE)):
        given = str(folder)
    else:
        given = "FOLDER, the folder of the data that the weights were trained on"
    raise UsageError(
        f"{what}; prepare the data with --tokenizer {given}, or accept it with "
        "data.accept_changes=True"
    )
