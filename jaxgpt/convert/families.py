"""Conversion between transformers' config.json and jaxgpt's options, for each model family."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxgpt.config import ModelConfig, UsageError, config_from_dict
from jaxgpt.config.validate import validate
from jaxgpt.convert import names
from jaxgpt.convert.names import Table
from jaxgpt.convert.safetensors import read_json

CONFIG = "config.json"
# Files that are copied with the weights, so that an export can include them.
COMPANIONS = (
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model",
    "chat_template.jinja", "generation_config.json",
)  # fmt: skip
# activation_function -> model.mlp
ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
TRAINED_CONTEXT = "original_max_position_embeddings"
LLAMA3_ROPE = ("factor", "low_freq_factor", "high_freq_factor", TRAINED_CONTEXT)
ROPE_TYPES = {"default": (), "linear": ("factor",), "llama3": LLAMA3_ROPE}  # type -> its parameters
LAYER_TYPES = {"full_attention": "global", "sliding_attention": "local"}
WITH_PATTERNS = ("qwen2", "qwen3", "gemma3_text")  # families that can mix layer types


def table_of(model: ModelConfig) -> Table:
    """Return the table of transformers tensor names for a model, without GPT-2's prefix."""
    if model.position == "learned":
        return names.GPT2
    has_equal_heads = model.kv_heads == model.n_head
    if model.post_norm:
        return names.GEMMA3_EQUAL_HEADS if has_equal_heads else names.GEMMA3
    return names.LLAMA_EQUAL_HEADS if has_equal_heads else names.LLAMA


def read_model(folder: Path, block_size: int | None = None) -> ModelConfig:
    """Return the model that a folder's config.json describes.

    If `block_size` is not None, it overrides the context length (in tokens). The returned model has
    no dropout. Raises `UsageError` if the file cannot be read, if the file or `block_size` is
    invalid, or if the model family or an option is not supported.
    """
    path = folder / CONFIG
    config = read_json(path)
    family = config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        moe = " (mixture of experts)" if "num_experts" in config or "moe" in str(family) else ""
        raise UsageError(
            f"{path}: model_type {family}{moe} is not supported, only {', '.join(FAMILIES)}"
        )
    keys = _Keys(path, config)
    keys.only("is_causal", True)
    try:
        options = FAMILIES[family](keys)
    except (TypeError, AttributeError, ArithmeticError) as error:
        raise UsageError(f"{path}: is not a valid model configuration ({error})") from None
    changed = {} if block_size is None else {"block_size": block_size}
    return checked_model(options | changed, path)


def checked_model(options: Mapping[str, Any], where: Path) -> ModelConfig:
    """Return a validated model. The keys of `options` are field names of `ModelConfig`.

    Raises `UsageError` if the options are invalid. The message begins with `where`. Unknown values
    of model.mlp and model.attention are not detected.
    """
    given = {"model": {k: list(v) if isinstance(v, tuple) else v for k, v in options.items()}}
    try:
        config = config_from_dict(given, str(where))
        validate(config.replace(train__batch_size=1, parallel__scan_layers=True))
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
    return config.model


class _Keys:
    """Checked access to a config.json; missing or unsupported values raise `UsageError`."""

    def __init__(self, path: Path, config: Mapping[str, Any]):
        self.path, self.config = path, config

    def get(self, key: str, default: Any = None) -> Any:
        value = self.config.get(key)
        return default if value is None else value

    def count(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if type(value) is not int or value < 1:
            raise UsageError(f"{self.path}: {key} is {value}; it must be a whole number above 0")
        return value

    def n_layers(self, key: str) -> int:
        """Return the number of layers. Raise `UsageError` if it is above 100,000."""
        value = self.count(key)
        if value > 100_000:
            raise UsageError(f"{self.path}: {key} is {value}; it must be at most 100,000")
        return value

    def only(self, key: str, *supported: Any) -> Any:
        """Return the value of `key`, or `supported[0]` if it is missing.

        Raises `UsageError` if the value is not supported.
        """
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
        "n_layer": keys.n_layers("n_layer"),
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
    keys: _Keys, head_dim: int | None = None, layer_types: Sequence[str] | None = None
) -> dict[str, Any]:
    """Return the options of Llama and models derived from it.

    Args:
        head_dim: used if config.json has no head_dim. None means hidden_size / num_attention_heads.
        layer_types: used if config.json has no layer_types. None means full attention in all
            layers.
    """
    keys.only("hidden_act", "silu")
    keys.only("attention_bias", False)
    keys.only("mlp_bias", False)
    return _decoder(keys, head_dim, layer_types) | {
        "norm": "rmsnorm",
        "mlp": "swiglu",
        "tie_embeddings": keys.only("tie_word_embeddings", False, True),
        **_rope(keys, *_rope_parameters(keys)),
    }


def _decoder(
    keys: _Keys, head_dim: int | None, layer_types: Sequence[str] | None
) -> dict[str, Any]:
    """Return the sizes and the layer pattern of a model from any family except GPT-2."""
    keys.only("num_experts", 0)
    keys.only("num_local_experts", 0)
    heads, width = keys.count("num_attention_heads"), keys.count("hidden_size")
    groups = keys.count("num_key_value_heads", heads)
    size = keys.get("head_dim", head_dim)
    return {
        "n_layer": keys.n_layers("num_hidden_layers"),
        "n_head": heads,
        "n_kv_head": None if groups == heads else groups,
        "head_dim": None if size == width / heads else size,
        "n_embd": width,
        "block_size": keys.count("max_position_embeddings"),
        "vocab_size": keys.count("vocab_size"),
        "norm_eps": keys.get("rms_norm_eps", 1e-6),
        "position": "rope",
        "mlp_hidden": keys.count("intermediate_size"),
        **_layers(keys, layer_types),
    }


def _layers(keys: _Keys, default: Sequence[str] | None) -> dict[str, Any]:
    """Return model.layers (the shortest repeating pattern) and model.sliding_window.

    Both are left out if no layer has a sliding window. The pattern is also left out if all layers
    have a sliding window. `default` lists the layer types to use if config.json has no layer_types.
    None means full attention in all layers.
    """
    n_layer = keys.n_layers("num_hidden_layers")
    default = default or ["full_attention"] * n_layer
    found = keys.get("layer_types", default)
    # For families whose layers all have the same type, transformers ignores layer_types.
    supported = LAYER_TYPES if keys.config["model_type"] in WITH_PATTERNS else set(default)
    unknown = sorted(map(str, set(found) - set(supported)))
    if unknown:
        words = ", ".join(unknown)
        raise UsageError(
            f"{keys.path}: layer_types {words} are not supported, only {' or '.join(supported)}"
        )
    if len(found) != n_layer:
        raise UsageError(
            f"{keys.path}: layer_types has {len(found)} entries for num_hidden_layers={n_layer}; "
            "give one for each layer"
        )
    if "sliding_attention" not in found:
        return {}
    window = keys.count("sliding_window")
    if len(set(found)) == 1:
        return {"sliding_window": window}
    kinds = [LAYER_TYPES[kind] for kind in found]
    period = next(p for p in range(1, n_layer + 1) if kinds[p:] == kinds[:-p])
    return {"sliding_window": window, "layers": tuple(kinds[:period])}


def _rope_parameters(keys: _Keys) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return rope_parameters (transformers 5) and rope_scaling (earlier versions)."""
    new, old = keys.get("rope_parameters", {}), keys.get("rope_scaling", {})
    for name, found in (("rope_parameters", new), ("rope_scaling", old)):
        if not isinstance(found, dict) or any(isinstance(v, dict) for v in found.values()):
            raise UsageError(f"{keys.path}: {name} is {found}; it must be a single flat object")
    if new and old and new != old:
        raise UsageError(
            f"{keys.path}: rope_parameters and rope_scaling differ; remove the wrong one"
        )
    return new, old


def _rope(
    keys: _Keys, new: Mapping[str, Any], old: Mapping[str, Any], default: float = 10000.0
) -> dict[str, Any]:
    """Return the rotary embedding options. `default` is used if config.json has no rope_theta.

    `_rope_parameters` returns `new` and `old`.
    """
    scaling = new or old
    trained = keys.get(TRAINED_CONTEXT)
    if trained is not None and scaling.get(TRAINED_CONTEXT, trained) != trained:
        raise UsageError(
            f"{keys.path}: {TRAINED_CONTEXT}={trained} differs from the one in "
            f"{'rope_parameters' if new else 'rope_scaling'}; remove the wrong one"
        )
    theta = scaling.get("rope_theta", keys.get("rope_theta", default))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ROPE_TYPES:
        words = ", ".join(ROPE_TYPES)
        raise UsageError(f"{keys.path}: rope type {kind} is not supported, only {words}")
    share = scaling.get("partial_rotary_factor", keys.get("partial_rotary_factor", 1.0))
    if share != 1.0:
        raise UsageError(f"{keys.path}: partial_rotary_factor={share} is not supported, only 1")
    numbers = {TRAINED_CONTEXT: trained, **scaling}
    missing = [name for name in ROPE_TYPES[kind] if numbers.get(name) is None]
    if missing:
        raise UsageError(f"{keys.path}: rope type {kind} has no {', '.join(missing)}")
    found = tuple(numbers[name] for name in ROPE_TYPES[kind])
    return {"rope_theta": theta} | ({"rope_scaling": found} if found else {})


def _mistral(keys: _Keys) -> dict[str, Any]:
    # transformers uses a window of 4096 if config.json does not set one.
    if keys.config.get("sliding_window", 4096) is None:
        return _llama(keys)
    keys = _Keys(keys.path, {"sliding_window": 4096, **keys.config})
    return _llama(keys, layer_types=["sliding_attention"] * keys.n_layers("num_hidden_layers"))


def _qwen(keys: _Keys, head_dim: int | None = None) -> dict[str, Any]:
    """Return the options of Qwen2 and Qwen3.

    If use_sliding_window is true and sliding_window is not null, only the first max_window_layers
    layers have full attention.
    """
    keys = _Keys(keys.path, {"sliding_window": 4096, **keys.config})
    n_layer = n_full = keys.n_layers("num_hidden_layers")
    if keys.only("use_sliding_window", False, True) and keys.get("sliding_window") is not None:
        n_full = keys.get("max_window_layers", 28)
    types = ["full_attention" if i < n_full else "sliding_attention" for i in range(n_layer)]
    return _llama(keys, head_dim, types)


def _qwen2(keys: _Keys) -> dict[str, Any]:
    return _qwen(keys) | {"qkv_bias": True}


def _qwen3(keys: _Keys) -> dict[str, Any]:
    return _qwen(keys, head_dim=128) | {"qk_norm": True}


def _gemma3(keys: _Keys) -> dict[str, Any]:
    keys.only("hidden_activation", "gelu_pytorch_tanh")
    keys.only("attention_bias", False)
    keys.only("attn_logit_softcapping", None)
    keys.only("use_bidirectional_attention", False)
    pattern, n_layer = keys.count("sliding_window_pattern", 6), keys.n_layers("num_hidden_layers")
    types = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(n_layer)]
    keys = _Keys(keys.path, {"sliding_window": 4096, **keys.config})
    new = keys.get("rope_parameters", {})
    if any(isinstance(v, dict) for v in new.values()):  # transformers 5
        full, local = new.get("full_attention") or {}, new.get("sliding_attention") or {}
        if not keys.get("rope_scaling", {}).items() <= full.items():
            raise UsageError(
                f"{keys.path}: rope_scaling differs from full_attention in rope_parameters; remove "
                "the wrong one"
            )
        rope = _rope(keys, full, {}, 1e6)
        kind = local.get("rope_type", local.get("type", "default"))
        if kind != "default":
            raise UsageError(
                f"{keys.path}: rope type {kind} of sliding_attention is not supported, only default"
            )
        local_theta = local.get("rope_theta", keys.get("rope_local_base_freq", 10000.0))
    elif new:
        raise UsageError(
            f"{keys.path}: rope_parameters is {new}; it must have the objects full_attention and "
            "sliding_attention"
        )
    else:
        rope = _rope(keys, *_rope_parameters(keys), 1e6)
        local_theta = keys.get("rope_local_base_freq", 10000.0)
    size = keys.count("head_dim", 256)
    scalar = keys.get("query_pre_attn_scalar", 256)
    layers = _decoder(keys, size, types)
    return layers | {
        "head_dim": size,
        "norm": "rmsnorm_1p",
        "post_norm": True,
        "qk_norm": True,
        "mlp": "geglu_tanh",
        "tie_embeddings": keys.only("tie_word_embeddings", True, False),
        "scale_embeddings": True,
        "query_pre_attn_scalar": None if scalar == size else scalar,
        "logit_softcap": keys.get("final_logit_softcapping"),
        **({"local_rope_theta": local_theta} if "sliding_window" in layers else {}),
        **rope,
    }


FAMILIES: dict[str, Callable[[_Keys], dict[str, Any]]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma3_text": _gemma3,
}


# Option values that an exported model must have, for each family.
_COMMON = {"post_norm": False, "scale_embeddings": False, "query_pre_attn_scalar": None}
_FIXED: dict[str, dict[str, Any]] = {
    "gpt2": _COMMON | {
        "norm": "layernorm", "position": "learned", "qkv_bias": False, "qk_norm": False,
        "tie_embeddings": True, "sliding_window": None, "logit_softcap": None,
    },
    "llama": _COMMON | {
        "norm": "rmsnorm", "position": "rope", "mlp": "swiglu", "bias": False,
        "logit_softcap": None, "local_rope_theta": None,
    },
    "gemma3_text": {
        "norm": "rmsnorm_1p", "position": "rope", "mlp": "geglu_tanh", "bias": False,
        "post_norm": True, "scale_embeddings": True, "qk_norm": True, "qkv_bias": False,
    },
}  # fmt: skip


def write_config(model: ModelConfig, dtype: str, end_of_text: int | None) -> dict[str, Any]:
    """Return the config.json of a model.

    Args:
        model: its vocab_size must be set.
        dtype: dtype of the exported weights, "float32" or "bfloat16".
        end_of_text: ID of the end-of-text token, or None if there is no such token.

    Raises `UsageError` if the model fits none of `FAMILIES`.
    """
    is_gpt2 = model.position == "learned"
    family = "gpt2" if is_gpt2 else "gemma3_text" if model.post_norm else "llama"
    wanted = _FIXED[family]
    wrong = [
        f"model.{key}={getattr(model, key)}" for key in wanted if getattr(model, key) != wanted[key]
    ]
    if is_gpt2 and (model.mlp not in ACTIVATIONS.values() or model.kv_heads != model.n_head):
        wrong.append(f"model.mlp={model.mlp} model.n_kv_head={model.n_kv_head}")
    if is_gpt2 and model.head_size * model.n_head != model.n_embd:
        wrong.append(f"model.head_dim={model.head_dim}")
    types = _layer_types(model)
    has_local = "sliding_attention" in types
    if family == "gemma3_text" and has_local and model.rope_scaling:
        if model.local_rope_theta is None:
            wrong.append("model.rope_scaling in local layers (model.local_rope_theta=None)")
    own = [key for key in ("qk_norm", "qkv_bias") if getattr(model, key)]
    is_plain_llama = family == "llama" and not own and not has_local
    if (is_plain_llama or family == "gemma3_text") and model.n_embd % model.n_head:
        wrong.append(f"model.n_embd={model.n_embd} (not a multiple of n_head={model.n_head})")
    if family == "llama":
        if len(own) > 1:
            wrong += [f"model.{key}={getattr(model, key)}" for key in own]
        if not own and len(set(types)) > 1:
            wrong.append(f"model.layers={' '.join(model.layers)}")
    if wrong:
        raise UsageError(
            f"to-hf: no transformers family has {' '.join(wrong)} with "
            f"model.position={model.position}; train a model that fits GPT-2, Llama, Mistral, "
            "Qwen2, Qwen3 or Gemma 3"
        )
    tokens = {"bos_token_id": end_of_text if is_gpt2 else None, "eos_token_id": end_of_text}
    common = {"vocab_size": model.vocab_size, "torch_dtype": dtype, "use_cache": True, **tokens}
    to_family = {"gpt2": _to_gpt2, "llama": _to_llama, "gemma3_text": _to_gemma3}[family]
    return common | to_family(model)


def _to_gpt2(model: ModelConfig) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_layer": model.n_layer,
        "n_head": model.n_head,
        "n_embd": model.n_embd,
        "n_positions": model.block_size,
        "n_inner": model.mlp_hidden,
        "activation_function": {mlp: name for name, mlp in ACTIVATIONS.items()}[model.mlp],
        "layer_norm_epsilon": model.norm_eps,
        "tie_word_embeddings": True,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), model.dropout),
    }


def _to_llama(model: ModelConfig) -> dict[str, Any]:
    """Return the config.json entries for Llama, Mistral, Qwen2 or Qwen3."""
    if model.qk_norm or model.qkv_bias:
        family, architecture = ("qwen3", "Qwen3") if model.qk_norm else ("qwen2", "Qwen2")
        types = _layer_types(model)
        own = {"use_sliding_window": "sliding_attention" in types, "layer_types": types}
        own |= {"sliding_window": model.sliding_window} if own["use_sliding_window"] else {}
        own |= {"attention_bias": False} if model.qk_norm else {}
        # Versions of transformers that do not support layer_types read this key.
        own |= {"max_window_layers": types.count("full_attention")}
    elif "sliding_attention" in _layer_types(model):
        family, architecture = "mistral", "Mistral"
        own = {"sliding_window": model.sliding_window}
    else:
        family, architecture = "llama", "Llama"
        own = {"attention_bias": False, "mlp_bias": False}
    return _to_decoder(model) | {
        "model_type": family,
        "architectures": [f"{architecture}ForCausalLM"],
        "hidden_act": "silu",
        "rope_theta": model.rope_theta,
        "rope_scaling": _rope_scaling(model),
        **own,
    }


def _to_gemma3(model: ModelConfig) -> dict[str, Any]:
    scaling, local = _rope_scaling(model), model.local_rope_theta or model.rope_theta
    return _to_decoder(model) | {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "query_pre_attn_scalar": model.query_pre_attn_scalar or model.head_size,
        "final_logit_softcapping": model.logit_softcap,
        "attn_logit_softcapping": None,
        "sliding_window": model.sliding_window or model.block_size,
        "layer_types": _layer_types(model),
        # transformers 4 reads the first three keys, and transformers 5 reads rope_parameters.
        "rope_theta": model.rope_theta,
        "rope_local_base_freq": local,
        "rope_scaling": scaling,
        "rope_parameters": {
            "full_attention": {
                "rope_theta": model.rope_theta,
                **(scaling or {"rope_type": "default"}),
            },
            "sliding_attention": {"rope_theta": local, "rope_type": "default"},
        },
    }


def _to_decoder(model: ModelConfig) -> dict[str, Any]:
    """Return the config.json entries that all families except GPT-2 share."""
    return {
        "num_hidden_layers": model.n_layer,
        "num_attention_heads": model.n_head,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_size,
        "hidden_size": model.n_embd,
        "intermediate_size": model.mlp_width,
        "max_position_embeddings": model.block_size,
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tie_embeddings,
        "attention_dropout": 0.0,
    }


def _rope_scaling(model: ModelConfig) -> dict[str, Any] | None:
    """Return rope_scaling for config.json, or None if RoPE is not scaled."""
    if not model.rope_scaling:
        return None
    kind = next(kind for kind, keys in ROPE_TYPES.items() if len(keys) == len(model.rope_scaling))
    out = dict(zip(ROPE_TYPES[kind], model.rope_scaling, strict=True))
    if kind == "llama3":
        out[LLAMA3_ROPE[-1]] = int(out[LLAMA3_ROPE[-1]])
    return {"rope_type": kind, **out}


def _layer_types(model: ModelConfig) -> list[str]:
    """Return the transformers layer type of each layer."""
    default = "global" if model.sliding_window is None else "local"
    pattern = model.layers or (default,)
    names_of = {kind: name for name, kind in LAYER_TYPES.items()}
    return [names_of[pattern[i % len(pattern)]] for i in range(model.n_layer)]
