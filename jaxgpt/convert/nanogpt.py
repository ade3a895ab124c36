"""Import of nanoGPT's ckpt.pt, and export as safetensors with nanoGPT's tensor names."""

import json
from pathlib import Path
from typing import Any

from jaxgpt.checkpoint.metadata import choose_checkpoint, read_meta
from jaxgpt.checkpoint.weights_only import WeightsReader
from jaxgpt.config import ModelConfig, UsageError, config_from_dict
from jaxgpt.convert import torch_file
from jaxgpt.convert.families import checked_model
from jaxgpt.convert.huggingface import read_tokenizer, write_weights
from jaxgpt.convert.layout import export_tensors, match_tensors, slots
from jaxgpt.convert.names import NANOGPT
from jaxgpt.convert.safetensors import write_folder
from jaxgpt.convert.tensors import check_tied, new_folder

MODEL_KEYS = ("n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size")
COMPILED_PREFIX = "_orig_mod."  # added to tensor names by torch.compile
HEAD = "lm_head.weight"  # tied to the token embedding


def from_nanogpt(path: Path, out: Path, tokenizer: Path | None = None) -> list[str]:
    """Import a ckpt.pt as initial weights for a run. Return the lines to print.

    `out` is the run directory to create. `tokenizer` is a path that `read_tokenizer` accepts, or
    None if the tokenizer is unknown. Raises `UsageError` if the file cannot be read, is damaged or
    is not from nanoGPT, if the tokenizer cannot be read or does not fit the model, or if torch is
    missing or too old. Also raises whatever `write_weights` raises.
    """
    checkpoint = torch_file.load(path)
    if not isinstance(checkpoint, dict) or not {"model", "model_args"} <= checkpoint.keys():
        raise UsageError(
            f"{path}: has no model and model_args; give a ckpt.pt from nanoGPT's train.py"
        )
    model = model_of(path, checkpoint["model_args"])
    found = tensors_of(path, checkpoint["model"])
    found = {
        name: tensor
        for name, tensor in found.items()
        if not name.endswith(".attn.bias")  # the causal mask
    }
    head = found.pop(HEAD, None)
    wanted = match_tensors(found, NANOGPT, model, str(path))
    remedy = "jaxgpt needs one matrix for both, as in nanoGPT"
    check_tied(head, found["transformer.wte.weight"], str(path), remedy)
    made = read_tokenizer(tokenizer, model.vocab_size)
    return write_weights(path, out, found, wanted, model, made)


def model_of(path: Path, arguments: Any) -> ModelConfig:
    """Return the model that a checkpoint's model_args describe, but without dropout.

    Raises `UsageError` if an argument is missing or invalid.
    """
    values = arguments if isinstance(arguments, dict) else {}
    missing = [key for key in MODEL_KEYS if type(values.get(key)) not in (int, bool)]
    if missing:
        raise UsageError(f"{path}: its model_args have no {', '.join(missing)}")
    return checked_model({key: values[key] for key in MODEL_KEYS}, path)


def tensors_of(path: Path, state: Any) -> dict[str, torch_file.TorchTensor]:
    """Return the tensors in a state_dict, with torch.compile's prefix removed from their names.

    Raises `UsageError` if `state` is not a state_dict of tensors, or if torch is missing or too
    old.
    """
    if not isinstance(state, dict) or not all(map(torch_file.is_tensor, state.values())):
        raise UsageError(f"{path}: its model is not a state_dict of tensors")
    names = {str(key).removeprefix(COMPILED_PREFIX): tensor for key, tensor in state.items()}
    return {name: torch_file.TorchTensor(path, name, tensor) for name, tensor in names.items()}


def to_nanogpt(run: Path, step: int | None, out: Path, dtype: str) -> list[str]:
    """Export the weights of a run as safetensors, with nanoGPT's model_args in model_args.json.

    Args:
        run: run directory.
        step: checkpoint to export. None means the newest checkpoint.
        out: folder to create.
        dtype: "float32" or "bfloat16".

    Returns the lines to print. Raises `UsageError` if the checkpoint is missing, damaged or
    unreadable, if nanoGPT does not support an option of the model, or if `safetensors` is not
    installed. Raises `OSError` if model_args.json cannot be written, unless the disk is full. Also
    raises whatever `new_folder` and `write_folder` raise.
    """
    step = choose_checkpoint(run, step)
    model = config_from_dict(read_meta(run, step)["config"], str(run)).model
    expected = ModelConfig(
        **{key: getattr(model, key) for key in MODEL_KEYS},
        dropout=model.dropout,
        attention=model.attention,
    )
    found, nanogpt = vars(model.explicit), vars(expected.explicit)
    differ = [key for key in found if found[key] != nanogpt[key]]
    if differ:
        given = [key for key in differ if getattr(model, key) != getattr(expected, key)]
        words = " ".join(f"model.{key}={getattr(model, key)}" for key in given)
        raise UsageError(f"to-nanogpt: nanoGPT does not support {words}; try to-hf")
    wanted = slots(NANOGPT, model)
    shapes = {name: slot.shape for name, slot in wanted.items()}
    with new_folder(out) as partial:
        tensors = export_tensors(WeightsReader(run, step), wanted)
        write_folder(partial, tensors, shapes, dtype)
        arguments = {key: getattr(model, key) for key in (*MODEL_KEYS, "dropout")}
        (partial / "model_args.json").write_text(json.dumps(arguments, indent=2) + "\n")
    return [
        f"wrote {out}: step {step}, {dtype}; load it with load_state_dict(..., strict=False), "
        f"which keeps {HEAD} tied"
    ]
