"""Models of Hugging Face's transformers: config.json, safetensors and tokenizer files."""

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
from jaxgpt.convert.safetensors import SHARD_BYTES, open_folder, write_folder
from jaxgpt.convert.tensors import Tensor, new_folder
from jaxgpt.data.tokenizers import FILE as TOKENIZER
from jaxgpt.data.tokenizers import HFTokenizer, Tokenizer, load_tokenizer, tokenizer_from_meta

BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")  # no weights
GPT2_PREFIX = "transformer."  # of names in files that GPT2LMHeadModel saved


def from_hf(
    path: Path, out: Path, block_size: int | None = None, tokenizer: Path | None = None
) -> list[str]:
    """Convert a folder into weights that a run starts from; return lines about them.

    `tokenizer`, as `read_tokenizer` takes it, stands in for the folder's own.
    """
    found, model = open_folder(path), read_model(path, block_size)
    found = {name.removeprefix(GPT2_PREFIX): tensor for name, tensor in found.items()}
    tied = {"lm_head.weight"} if model.tie_embeddings else set()
    found = {
        name: tensor
        for name, tensor in found.items()
        if not (name.endswith(BUFFERS) or name in tied)
    }
    if block_size and "wpe.weight" in found:
        raise UsageError("--block-size: is for rotary positions; give model.block_size to train")
    wanted = match_tensors(found, table_of(model), model, str(path))
    has_tokenizer = any((path / name).is_file() for name in (TOKENIZER, "merges.txt", "vocab.bpe"))
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
    """Write the matched tensors of `path` as weights that a run starts from, with the tokenizer.

    `companions` are files of `path` that go along. Return lines about the weights.
    """
    with new_folder(out) as partial:
        writer = WeightsWriter(partial, model)
        import_tensors(found, wanted, writer)
        if tokenizer is not None:
            tokenizer.save(partial)
        for name in companions:
            if (path / name).is_file():
                shutil.copyfile(path / name, partial / name)
        meta = tokenizer and tokenizer.to_meta()
        writer.close(Config(model=model), meta, str(path.absolute()))
    return describe(out, model, tokenizer)


def describe(out: Path, model: ModelConfig, tokenizer: Tokenizer | None) -> list[str]:
    """Return lines about converted weights."""
    changed = [
        f"{field.name}={getattr(model, field.name)}"
        for field in dataclasses.fields(model)
        if getattr(model, field.name) != field.default
    ]
    lines = [f"model: {' '.join(changed)}", f"weights: {out}, to start with train.init_from={out}"]
    if tokenizer is None:
        lines.append("tokenizer: none came with them; a run takes its data's word for its tokens")
    return lines


def read_tokenizer(path: Path | None, vocab_size: int) -> Tokenizer | None:
    """Return the tokenizer that a user names, as `load_tokenizer` does; `UsageError` if it is of
    more tokens than the model."""
    if path is None:
        return None
    tokenizer = load_tokenizer(path)
    if tokenizer.vocab_size > vocab_size:
        raise UsageError(
            f"{path}: its tokenizer has {tokenizer.vocab_size} tokens, and the model {vocab_size}; "
            "give the tokenizer that the model was trained with"
        )
    return tokenizer


def to_hf(
    run: Path, step: int | None, out: Path, dtype: str, max_bytes: int = SHARD_BYTES
) -> list[str]:
    """Write the weights of a run as a folder that transformers reads; return lines about it."""
    step = choose_checkpoint(run, step)
    meta = read_meta(run, step)
    model = config_from_dict(meta["config"], str(run)).model
    tokenizer = tokenizer_from_meta(meta["tokenizer"], run) if meta["tokenizer"] else None
    config = write_config(model, dtype, tokenizer and tokenizer.end_of_text)
    prefix = GPT2_PREFIX if model.position == "learned" else ""
    wanted = {f"{prefix}{name}": slot for name, slot in slots(table_of(model), model).items()}
    shapes = {name: slot.shape for name, slot in wanted.items()}
    absent = {} if model.bias or not prefix else zero_biases(model)
    reader = WeightsReader(run, step)
    with new_folder(out) as partial:
        zeros = ((name, np.zeros(shape, np.float32)) for name, shape in absent.items())
        tensors = itertools.chain(export_tensors(reader, wanted), zeros)
        write_folder(partial, tensors, shapes | absent, dtype, max_bytes)
        write_json(partial / CONFIG, config)
        notes = write_tokenizer(tokenizer, run, partial, model)
    return [f"wrote {out}: {config['model_type']}, step {step}, {dtype}", *notes]


def zero_biases(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of GPT-2's biases, for a model without: zeros are the same function."""
    with_bias = dataclasses.replace(model, bias=True)
    return {
        f"{GPT2_PREFIX}{name}": slot.shape
        for name, slot in slots(table_of(model), with_bias).items()
        if slot.weight.role == "bias"
    }


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def write_tokenizer(
    tokenizer: Tokenizer | None, run: Path, folder: Path, model: ModelConfig
) -> list[str]:
    """Write a tokenizer's files and what came with it; return a line if there is none."""
    if not isinstance(tokenizer, HFTokenizer):
        return ["tokenizer: none written; the tokens of this run are not those of a tokenizer.json"]
    tokenizer.save(folder)
    for name in COMPANIONS:
        if (run / name).is_file():
            shutil.copyfile(run / name, folder / name)
    if not (folder / COMPANIONS[0]).exists():
        end = tokenizer.end_of_text
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": model.block_size,
            "clean_up_tokenization_spaces": False,
            # A run's texts have none, whatever tokenizer.json would add.
            "add_bos_token": False,
            "add_eos_token": False,
        }
        settings |= {} if end is None else {"eos_token": tokenizer.decode([end])}
        write_json(folder / COMPANIONS[0], settings)
    return []
