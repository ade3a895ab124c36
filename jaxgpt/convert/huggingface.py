"""Import and export of Hugging Face Transformers checkpoints, including the tokenizer."""

import dataclasses
import itertools
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxgpt.checkpoint.metadata import choose_checkpoint, read_meta
from jaxgpt.checkpoint.weights_only import WeightsReader, WeightsWriter
from jaxgpt.config import Config, ModelConfig, UsageError, config_from_dict
from jaxgpt.convert.families import COMPANIONS, CONFIG, read_model, table_of, write_config
from jaxgpt.convert.layout import Slot, export_tensors, import_tensors, match_tensors, slots
from jaxgpt.convert.safetensors import open_folder, read_json, write_folder
from jaxgpt.convert.tensors import Tensor, check_tied, new_folder
from jaxgpt.data.tokenizers import (
    TOKENIZER_FILE,
    HFTokenizer,
    Tokenizer,
    load_tokenizer,
    tokenizer_from_meta,
)

BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")  # not weights
GPT2_PREFIX = "transformer."  # prefix of tensor names in files saved by GPT2LMHeadModel


def from_hf(
    path: Path, out: Path, block_size: int | None = None, tokenizer: Path | None = None
) -> list[str]:
    """Import a Transformers checkpoint as initial weights for a run. Return the lines to print.

    Args:
        path: folder with config.json and safetensors files.
        out: run directory to create.
        block_size: new context length in tokens, for a model with rotary positions. If None, the
            length is unchanged.
        tokenizer: path that `read_tokenizer` accepts. None selects `path` if it contains a
            tokenizer.json, merges.txt or vocab.bpe, and no tokenizer otherwise.

    Raises `UsageError` if a file in the folder is missing, damaged or not supported, if the tensors
    do not match config.json, if `block_size` does not fit the model, or if the package
    `safetensors` is not installed. Raises `OSError` if the folder cannot be accessed. Also raises
    whatever `read_tokenizer` and `write_weights` raise.
    """
    found, model = open_folder(path), read_model(path, block_size)
    found = {name.removeprefix(GPT2_PREFIX): tensor for name, tensor in found.items()}
    found = {name: tensor for name, tensor in found.items() if not name.endswith(BUFFERS)}
    head = found.pop("lm_head.weight", None) if model.tie_embeddings else None
    if block_size and "wpe.weight" in found:
        raise UsageError("--block-size: needs rotary positions; set model.block_size when training")
    wanted = match_tensors(found, table_of(model), model, str(path))
    embedding, remedy = "model.embed_tokens.weight", f"set tie_word_embeddings to false in {CONFIG}"
    if model.position == "learned":
        embedding, remedy = "wte.weight", "jaxgpt needs one matrix for both, as in GPT-2"
    check_tied(head, found[embedding], str(path), remedy)
    has_tokenizer = any(
        (path / name).is_file() for name in (TOKENIZER_FILE, "merges.txt", "vocab.bpe")
    )
    own = path if has_tokenizer else None
    made = read_tokenizer(tokenizer or own, model.vocab_size)
    return write_weights(path, out, found, wanted, model, made, COMPANIONS)


def write_weights(
    path: Path,
    out: Path,
    found: Mapping[str, Tensor],
    wanted: Mapping[str, Slot],
    model: ModelConfig,
    tokenizer: Tokenizer | None,
    companions: Sequence[str] = (),
) -> list[str]:
    """Write matched tensors as initial weights for a run. Return the lines to print.

    Args:
        path: imported file or folder.
        out: folder to create.
        found: imported tensors by name.
        wanted: slot of each tensor, as returned by `match_tensors`.
        tokenizer: the model's tokenizer, or None if it is unknown.
        companions: names of files to copy from `path` to `out` if they exist.

    Raises `UsageError` if a tensor cannot be read, and `OSError` if the tokenizer cannot be written
    or a companion cannot be copied. Also raises whatever `new_folder` and `WeightsWriter` raise.
    """
    with new_folder(out) as partial:
        writer = WeightsWriter(partial, model)
        import_tensors(found, wanted, writer)
        for name in companions:
            if (path / name).is_file():
                shutil.copyfile(path / name, partial / name)
        if tokenizer is not None:  # it may replace a companion, such as tokenizer.model
            tokenizer.save(partial)
        meta = tokenizer and tokenizer.to_meta()
        writer.close(Config(model=model), meta, str(path.absolute()))
    return describe(out, model, tokenizer)


def describe(out: Path, model: ModelConfig, tokenizer: Tokenizer | None) -> list[str]:
    """Return lines to print about imported weights. `tokenizer` is None if it is unknown."""
    changed = [
        f"{field.name}={getattr(model, field.name)}"
        for field in dataclasses.fields(model)
        if getattr(model, field.name) != field.default
    ]
    lines = [f"model: {' '.join(changed)}", f"weights: {out}; train with train.init_from={out}"]
    if tokenizer is None:
        lines.append("tokenizer: none found; give --tokenizer, or train on data with these tokens")
    return lines


def read_tokenizer(path: Path | None, vocab_size: int) -> Tokenizer | None:
    """Return the tokenizer at a path that `load_tokenizer` accepts, or None if `path` is None.

    Raises `UsageError` if the tokenizer has more tokens than the model. Also raises whatever
    `load_tokenizer` raises.
    """
    if path is None:
        return None
    tokenizer = load_tokenizer(path)
    if tokenizer.vocab_size > vocab_size:
        raise UsageError(
            f"{path}: the tokenizer has {tokenizer.vocab_size} tokens, but the model has "
            f"{vocab_size}; give the tokenizer that the model was trained with"
        )
    return tokenizer


def to_hf(run: Path, step: int | None, out: Path, dtype: str) -> list[str]:
    """Export a run's weights as a Transformers checkpoint. Return the lines to print.

    Args:
        run: run directory.
        step: checkpoint to export. None means the newest checkpoint.
        out: folder to create.
        dtype: "float32" or "bfloat16".

    Raises `UsageError` if the checkpoint or its tokenizer is missing, damaged or unreadable, if the
    model fits none of `families.FAMILIES`, or if a required package (`safetensors` or `tokenizers`)
    is not installed. Raises `OSError` if a file cannot be copied or written. Also raises whatever
    `new_folder` and `write_folder` raise.
    """
    step = choose_checkpoint(run, step)
    meta = read_meta(run, step)
    model = config_from_dict(meta["config"], str(run)).model
    tokenizer = tokenizer_from_meta(meta["tokenizer"], run) if meta["tokenizer"] else None
    config = write_config(model, dtype, tokenizer and tokenizer.end_of_text)
    prefix = GPT2_PREFIX if model.position == "learned" else ""
    wanted = {f"{prefix}{name}": slot for name, slot in slots(table_of(model), model).items()}
    shapes = {name: slot.shape for name, slot in wanted.items()}
    absent = {} if model.bias or not prefix else _zero_biases(model)
    reader = WeightsReader(run, step)
    with new_folder(out) as partial:
        zeros = ((name, np.zeros(shape, np.float32)) for name, shape in absent.items())
        tensors = itertools.chain(export_tensors(reader, wanted), zeros)
        write_folder(partial, tensors, shapes | absent, dtype)
        _write_json(partial / CONFIG, config)
        notes = _write_tokenizer(tokenizer, run, partial, model)
    return [f"wrote {out}: {config['model_type']}, step {step}, {dtype}", *notes]


def _zero_biases(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of each bias that GPT-2 lacks if model.bias=False.

    These biases are exported as zeros, because GPT-2 in transformers always has biases. The names
    include GPT-2's prefix.
    """
    with_bias = dataclasses.replace(model, bias=True)
    return {
        f"{GPT2_PREFIX}{name}": slot.shape
        for name, slot in slots(table_of(model), with_bias).items()
        if slot.weight.role == "bias"
    }


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def _write_tokenizer(
    tokenizer: Tokenizer | None, run: Path, folder: Path, model: ModelConfig
) -> list[str]:
    """Write a tokenizer.json and its companion files to `folder`. Return the lines to print.

    If the run has no tokenizer_config.json, a new one is written, and the post-processor, which may
    add special tokens, is removed from tokenizer.json. If the run does not use a tokenizer.json,
    nothing is written, and the returned line says so. Raises `UsageError` if the `tokenizers`
    package is needed but not installed, and `OSError` if a file cannot be written.
    """
    if not isinstance(tokenizer, HFTokenizer):
        return ["tokenizer: not exported, because this run does not use a tokenizer.json"]
    tokenizer.save(folder)
    for name in COMPANIONS:
        if (run / name).is_file():
            shutil.copyfile(run / name, folder / name)
    if not (folder / COMPANIONS[0]).exists():
        # jaxgpt trains on text without special tokens, even if tokenizer.json would add some.
        content = read_json(folder / TOKENIZER_FILE)
        _write_json(folder / TOKENIZER_FILE, content | {"post_processor": None})
        end = tokenizer.end_of_text
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": model.block_size,
            "clean_up_tokenization_spaces": False,
        }
        settings |= {} if end is None else {"eos_token": tokenizer.decode([end])}
        _write_json(folder / COMPANIONS[0], settings)
    return []
