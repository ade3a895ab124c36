"""Models of Hugging Face's transformers: config.json, safetensors and tokenizer files."""

import dataclasses
import json
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxgpt.checkpoint.weights_only import WeightsReader, WeightsWriter, newest_weights
from jaxgpt.config import Config, ModelConfig, UsageError, config_from_dict, validate
from jaxgpt.convert import names
from jaxgpt.convert.layout import Slot, check_tensors, export_tensors, import_tensors, slots
from jaxgpt.convert.names import Table
from jaxgpt.convert.safetensors import Writer, open_folder, read_json
from jaxgpt.convert.tensors import FLOATS, new_folder
from jaxgpt.data.tokenizers import FILE as TOKENIZER
from jaxgpt.data.tokenizers import Tokenizer, load_tokenizer, tokenizer_from_meta

CONFIG = "config.json"
# Kept beside the weights as they are, for who takes them back to transformers.
COMPANIONS = (
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model",
    "chat_template.jinja", "generation_config.json",
)  # fmt: skip
BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")  # no weights
ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
GPT2_HEAD, LLAMA_HEAD = "transformer.", ""  # in front of the names of the table


def from_hf(folder: Path, out: Path, block_size: int | None = None) -> list[str]:
    """Convert a folder into weights that a run starts from; return lines about them."""
    found, model = open_folder(folder), read_model(folder, block_size)
    found = {name.removeprefix(GPT2_HEAD): tensor for name, tensor in found.items()}
    wanted = slots(table_of(model), model)
    tied = {"lm_head.weight"} if model.tie_embeddings else set()
    found = {
        name: tensor
        for name, tensor in found.items()
        if name in wanted or not (name.endswith(BUFFERS) or name in tied)
    }
    if block_size and "wpe.weight" in found:
        raise UsageError("--block-size: is for rotary positions; give model.block_size to train")
    check_tensors(found, wanted, str(folder))
    tokenizer = read_tokenizer(folder, model.vocab_size)
    with new_folder(out, converted_bytes(wanted)) as partial:
        writer = WeightsWriter(partial, model)
        import_tensors(found, wanted, writer)
        save_tokenizer(tokenizer, partial)
        for name in COMPANIONS:
            if (folder / name).is_file():
                shutil.copyfile(folder / name, partial / name)
        writer.close(Config(model=model), tokenizer and tokenizer.to_meta(), str(folder.absolute()))
    return describe(out, model, tokenizer)


def converted_bytes(wanted: Mapping[str, Slot]) -> int:
    """Return the size of our weights in float32."""
    return sum(4 * weight.size for weight in {s.weight for s in wanted.values()})


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


def read_tokenizer(folder: Path, vocab_size: int) -> Tokenizer | None:
    """Return the tokenizer of a folder, if there is one; `UsageError` if it does not fit."""
    if not any((folder / name).is_file() for name in (TOKENIZER, "merges.txt", "vocab.bpe")):
        return None
    tokenizer = load_tokenizer(folder)
    if tokenizer.vocab_size > vocab_size:
        raise UsageError(
            f"{folder}: its tokenizer has {tokenizer.vocab_size} tokens, and the model "
            f"{vocab_size}; give the tokenizer that the model was trained with"
        )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer | None, folder: Path) -> None:
    """Write the files that a tokenizer's description refers to."""
    if tokenizer is not None:
        tokenizer.save(folder)


def table_of(model: ModelConfig) -> Table:
    """Return the names that transformers gives a model's weights, without GPT-2's prefix."""
    if model.position == "learned":
        return names.GPT2
    return names.LLAMA_EQUAL_HEADS if model.kv_heads == model.n_head else names.LLAMA


# --- config.json -> ModelConfig -----------------------------------------------------------------


def read_model(folder: Path, block_size: int | None = None) -> ModelConfig:
    """Return the model that a config.json describes; `UsageError` names what is not supported."""
    path = folder / CONFIG
    config = read_json(path)
    family = config.get("model_type")
    if family not in FAMILIES:
        moe = " (mixture of experts)" if "num_experts" in config or "moe" in str(family) else ""
        raise UsageError(
            f"{path}: model_type {family}{moe} is not supported; {', '.join(FAMILIES)} are"
        )
    try:
        model = ModelConfig(**FAMILIES[family](_Keys(path, config)))
        model = dataclasses.replace(model, block_size=block_size or model.block_size)
        validate(Config(model=model).replace(train__batch_size=1))
    except (TypeError, ArithmeticError) as error:
        raise UsageError(f"{path}: makes no sense ({error})") from None
    return model


class _Keys:
    """The keys of a config.json, with sentences for what is missing or not supported."""

    def __init__(self, path: Path, config: Mapping[str, Any]):
        self.path, self.config = path, config

    def get(self, key: str, default: Any = None) -> Any:
        value = self.config.get(key)
        return default if value is None else value

    def count(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if type(value) is not int or value < 1:
            raise UsageError(f"{self.path}: {key} is {value}; it must be a whole number")
        return value

    def only(self, key: str, *supported: Any) -> Any:
        """Return a value; refuse one that is not supported. The first is the default."""
        value = self.get(key, supported[0])
        if value not in supported:
            words = " or ".join(map(str, supported))
            raise UsageError(f"{self.path}: {key}={value} is not supported, only {words}")
        return value


def _gpt2(keys: _Keys) -> dict[str, Any]:
    keys.only("scale_attn_weights", True)
    keys.only("scale_attn_by_inverse_layer_idx", False)
    keys.only("add_cross_attention", False)
    keys.only("tie_word_embeddings", True)
    return {
        "n_layer": keys.count("n_layer"),
        "n_head": keys.count("n_head"),
        "n_embd": keys.count("n_embd"),
        "block_size": keys.count("n_positions", keys.get("n_ctx")),
        "vocab_size": keys.count("vocab_size"),
        "mlp": ACTIVATIONS[keys.only("activation_function", *ACTIVATIONS)],
        "mlp_hidden": keys.get("n_inner"),
        "norm_eps": float(keys.get("layer_norm_epsilon", 1e-5)),
        "bias": True,
    }


def _llama(keys: _Keys, head_dim: int | None = None) -> dict[str, Any]:
    keys.only("hidden_act", "silu")
    keys.only("attention_bias", False)
    keys.only("mlp_bias", False)
    keys.only("num_experts", 0)
    keys.only("num_local_experts", 0)
    heads, width = keys.count("num_attention_heads"), keys.count("hidden_size")
    groups = keys.count("num_key_value_heads", heads)
    size = keys.get("head_dim", head_dim)
    return {
        "n_layer": keys.count("num_hidden_layers"),
        "n_head": heads,
        "n_kv_head": None if groups == heads else groups,
        "head_dim": None if size == width / heads else size,
        "n_embd": width,
        "block_size": keys.count("max_position_embeddings"),
        "vocab_size": keys.count("vocab_size"),
        "norm": "rmsnorm",
        "norm_eps": float(keys.get("rms_norm_eps", 1e-6)),
        "position": "rope",
        "mlp": "swiglu",
        "mlp_hidden": keys.count("intermediate_size"),
        "tie_embeddings": keys.only("tie_word_embeddings", False, True),
        **_rope(keys),
    }


def _rope(keys: _Keys) -> dict[str, Any]:
    """Return the options of rotary positions; transformers 5 keeps them in rope_parameters."""
    new = keys.get("rope_parameters", {})
    scaling = new or keys.get("rope_scaling", {})
    if not isinstance(scaling, dict):
        raise UsageError(f"{keys.path}: rope_scaling is {scaling}; it must be an object")
    theta = float(new.get("rope_theta", keys.get("rope_theta", 10000.0)))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise UsageError(f"{keys.path}: rope type {kind} is not supported, only default or llama3")
    share = scaling.get("partial_rotary_factor", keys.get("partial_rotary_factor", 1.0))
    if share != 1.0:
        raise UsageError(f"{keys.path}: partial_rotary_factor={share} is not supported, only 1")
    if kind == "default":
        return {"rope_theta": theta}
    numbers = _Keys(keys.path, scaling)
    factors = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    missing = [name for name in factors if numbers.get(name) is None]
    if missing:
        raise UsageError(f"{keys.path}: rope type llama3 has no {', '.join(missing)}")
    return {"rope_theta": theta, "rope_scaling": tuple(float(scaling[name]) for name in factors)}


def _mistral(keys: _Keys) -> dict[str, Any]:
    # A config.json from before version 0.2 leaves out the window that it has.
    window = keys.config.get("sliding_window", 4096)
    return _llama(keys) | {"sliding_window": window}


def _qwen2(keys: _Keys) -> dict[str, Any]:
    _full_attention_only(keys)
    return _llama(keys) | {"qkv_bias": True}


def _qwen3(keys: _Keys) -> dict[str, Any]:
    _full_attention_only(keys)
    return _llama(keys, head_dim=128) | {"qk_norm": True}


def _full_attention_only(keys: _Keys) -> None:
    keys.only("use_sliding_window", False)
    kinds = set(keys.get("layer_types", [])) - {"full_attention"}
    if kinds:
        raise UsageError(f"{keys.path}: layer_types {', '.join(kinds)} are not supported")


FAMILIES: dict[str, Callable[[_Keys], dict[str, Any]]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
}
