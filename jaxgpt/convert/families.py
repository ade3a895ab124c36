"""config.json of transformers' model families, and our options: what each means in the other."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxgpt.config import ModelConfig, UsageError, config_from_dict
from jaxgpt.config.validate import validate
from jaxgpt.convert import names
from jaxgpt.convert.names import Table
from jaxgpt.convert.safetensors import read_json

CONFIG = "config.json"
# Kept beside the weights as they are, for who takes them back to transformers.
COMPANIONS = (
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model",
    "chat_template.jinja", "generation_config.json",
)  # fmt: skip
# activation_function -> model.mlp
ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
LLAMA3_ROPE = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def table_of(model: ModelConfig) -> Table:
    """Return the names that transformers gives a model's weights, without GPT-2's prefix."""
    if model.position == "learned":
        return names.GPT2
    return names.LLAMA_EQUAL_HEADS if model.kv_heads == model.n_head else names.LLAMA


def read_model(folder: Path, block_size: int | None = None) -> ModelConfig:
    """Return the model that a config.json describes; `UsageError` names what is not supported."""
    path = folder / CONFIG
    config = read_json(path)
    family = config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        moe = " (mixture of experts)" if "num_experts" in config or "moe" in str(family) else ""
        raise UsageError(
            f"{path}: model_type {family}{moe} is not supported; {', '.join(FAMILIES)} are"
        )
    try:
        options = FAMILIES[family](_Keys(path, config))
    except (TypeError, AttributeError, ArithmeticError) as error:
        raise UsageError(f"{path}: makes no sense ({error})") from None
    return checked_model(options | ({"block_size": block_size} if block_size else {}), path)


def checked_model(options: Mapping[str, Any], where: Path) -> ModelConfig:
    """Return the model of options from elsewhere, each within its bounds; else `UsageError`."""
    given = {"model": {k: list(v) if isinstance(v, tuple) else v for k, v in options.items()}}
    try:
        config = config_from_dict(given, str(where))
        validate(config.replace(train__batch_size=1))
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
    return config.model


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
        "norm_eps": keys.get("layer_norm_epsilon", 1e-5),
        "bias": True,
    }


def _llama(
    keys: _Keys, head_dim: int | None = None, layer_type: str = "full_attention"
) -> dict[str, Any]:
    keys.only("hidden_act", "silu")
    kinds = set(keys.get("layer_types", [])) - {layer_type}
    if kinds:
        words = ", ".join(sorted(map(str, kinds)))
        raise UsageError(f"{keys.path}: layer_types {words} are not supported, only {layer_type}")
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
        "norm_eps": keys.get("rms_norm_eps", 1e-6),
        "position": "rope",
        "mlp": "swiglu",
        "mlp_hidden": keys.count("intermediate_size"),
        "tie_embeddings": keys.only("tie_word_embeddings", False, True),
        **_rope(keys),
    }


def _rope(keys: _Keys) -> dict[str, Any]:
    """Return the options of rotary positions; transformers 5 keeps them in rope_parameters."""
    new, old = keys.get("rope_parameters", {}), keys.get("rope_scaling", {})
    for name, found in (("rope_parameters", new), ("rope_scaling", old)):
        if not isinstance(found, dict) or any(isinstance(v, dict) for v in found.values()):
            raise UsageError(f"{keys.path}: {name} is {found}; it must be one object of numbers")
    if new and old and new != old:
        raise UsageError(
            f"{keys.path}: rope_parameters and rope_scaling differ; leave out the wrong one"
        )
    scaling = new or old
    theta = new.get("rope_theta", keys.get("rope_theta", 10000.0))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise UsageError(f"{keys.path}: rope type {kind} is not supported, only default or llama3")
    share = scaling.get("partial_rotary_factor", keys.get("partial_rotary_factor", 1.0))
    if share != 1.0:
        raise UsageError(f"{keys.path}: partial_rotary_factor={share} is not supported, only 1")
    if kind == "default":
        return {"rope_theta": theta}
    numbers = _Keys(keys.path, scaling)
    missing = [name for name in LLAMA3_ROPE if numbers.get(name) is None]
    if missing:
        raise UsageError(f"{keys.path}: rope type llama3 has no {', '.join(missing)}")
    return {
        "rope_theta": theta,
        "rope_scaling": tuple(scaling[name] for name in LLAMA3_ROPE),
    }


def _mistral(keys: _Keys) -> dict[str, Any]:
    # transformers has a window of 4096 where config.json has no word of it.
    window = keys.config.get("sliding_window", 4096)
    kind = "full_attention" if window is None else "sliding_attention"
    return _llama(keys, layer_type=kind) | {"sliding_window": window}


def _qwen2(keys: _Keys) -> dict[str, Any]:
    keys.only("use_sliding_window", False)
    return _llama(keys) | {"qkv_bias": True}


def _qwen3(keys: _Keys) -> dict[str, Any]:
    keys.only("use_sliding_window", False)
    return _llama(keys, head_dim=128) | {"qk_norm": True}


FAMILIES: dict[str, Callable[[_Keys], dict[str, Any]]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
}


# The options that a family does not leave open.
_GPT2_OPTIONS = {
    "norm": "layernorm", "position": "learned", "qkv_bias": False, "qk_norm": False,
    "tie_embeddings": True, "sliding_window": None, "logit_softcap": None,
}  # fmt: skip
_LLAMA_OPTIONS = {
    "norm": "rmsnorm", "position": "rope", "mlp": "swiglu", "bias": False, "logit_softcap": None,
}  # fmt: skip


def write_config(model: ModelConfig, dtype: str, end_of_text: int | None) -> dict[str, Any]:
    """Return the config.json of a model; `UsageError` if transformers has no such family."""
    is_gpt2 = model.position == "learned"
    wanted = _GPT2_OPTIONS if is_gpt2 else _LLAMA_OPTIONS
    wrong = [
        f"model.{key}={getattr(model, key)}" for key in wanted if getattr(model, key) != wanted[key]
    ]
    if is_gpt2 and (model.mlp not in ACTIVATIONS.values() or model.kv_heads != model.n_head):
        wrong.append(f"model.mlp={model.mlp} model.n_kv_head={model.n_kv_head}")
    if is_gpt2 and model.head_size * model.n_head != model.n_embd:
        wrong.append(f"model.head_dim={model.head_dim}")
    special = [key for key in ("qk_norm", "qkv_bias", "sliding_window") if getattr(model, key)]
    if not is_gpt2 and not special and model.n_embd % model.n_head:
        wrong.append(f"model.n_embd={model.n_embd} (no multiple of model.n_head={model.n_head})")
    if len(special) > 1:
        wrong += [f"model.{key}={getattr(model, key)}" for key in special]
    if wrong:
        raise UsageError(
            f"to-hf: no family of transformers has {' '.join(wrong)} with "
            f"model.position={model.position}; GPT-2, Llama, Mistral, Qwen2 and Qwen3 are written"
        )
    tokens = {"bos_token_id": end_of_text if is_gpt2 else None, "eos_token_id": end_of_text}
    common = {"vocab_size": model.vocab_size, "torch_dtype": dtype, "use_cache": True, **tokens}
    return common | (_to_gpt2(model) if is_gpt2 else _to_llama(model, special))


def _to_gpt2(model: ModelConfig) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_layer": model.n_layer,
        "n_head": model.n_head,
        "n_embd": model.n_embd,
        "n_positions": model.block_size,
        "n_inner": model.mlp_hidden,
        "activation_function": {ours: theirs for theirs, ours in ACTIVATIONS.items()}[model.mlp],
        "layer_norm_epsilon": model.norm_eps,
        "tie_word_embeddings": True,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), model.dropout),
    }


def _to_llama(model: ModelConfig, special: list[str]) -> dict[str, Any]:
    """Return the keys of Llama or one of its kin, by the one option that is special to each."""
    family, architecture, own = {
        "": ("llama", "Llama", {"attention_bias": False, "mlp_bias": False}),
        "sliding_window": ("mistral", "Mistral", {"sliding_window": model.sliding_window}),
        "qkv_bias": ("qwen2", "Qwen2", {"use_sliding_window": False}),
        "qk_norm": ("qwen3", "Qwen3", {"use_sliding_window": False, "attention_bias": False}),
    }["".join(special)]
    rope: dict[str, Any] | None = None
    if model.rope_scaling:
        rope = {"rope_type": "llama3", **dict(zip(LLAMA3_ROPE, model.rope_scaling, strict=True))}
        rope[LLAMA3_ROPE[-1]] = int(rope[LLAMA3_ROPE[-1]])
    return {
        "model_type": family,
        "architectures": [f"{architecture}ForCausalLM"],
        "num_hidden_layers": model.n_layer,
        "num_attention_heads": model.n_head,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_size,
        "hidden_size": model.n_embd,
        "intermediate_size": model.mlp_width,
        "max_position_embeddings": model.block_size,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "rope_scaling": rope,
        "tie_word_embeddings": model.tie_embeddings,
        "attention_dropout": 0.0,
        **own,
    }
