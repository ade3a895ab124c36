"""Tables that map other programs' tensor names to jaxgpt's weights.

`{}` stands for the layer number. A table may list tensors that a model does not have, such as
biases or an output layer.
"""

from typing import Literal, NamedTuple

Form = Literal["same", "transposed", "interleaved"]


class WeightRef(NamedTuple):
    """The jaxgpt weight (or part of a weight) that corresponds to an external tensor."""

    name: str
    form: Form = "same"
    """Layout of the external tensor. "transposed" is (outputs, inputs), as in torch's Linear.
    "interleaved" is also transposed, with each head's q, k and v next to each other (Megatron)."""
    part: int | None = None
    """Index in a weight that combines several matrices: 0, 1, 2 for q, k, v; 0, 1 for k, v or for
    gate, up."""


def linear(name: str, part: int | None = None) -> WeightRef:
    """Return a reference to a jaxgpt kernel that torch's Linear stores transposed."""
    return WeightRef(f"{name}/kernel", "transposed", part)


Table = dict[str, WeightRef]

# Hugging Face's GPT-2, whose Conv1D stores kernels as (inputs, outputs).
GPT2: Table = {
    "wte.weight": WeightRef("token_embedding/embedding"),
    "wpe.weight": WeightRef("position_embedding/embedding"),
    "h.{}.ln_1.weight": WeightRef("layers/norm_1/scale"),
    "h.{}.ln_1.bias": WeightRef("layers/norm_1/bias"),
    "h.{}.attn.c_attn.weight": WeightRef("layers/attention/qkv/kernel"),
    "h.{}.attn.c_attn.bias": WeightRef("layers/attention/qkv/bias"),
    "h.{}.attn.c_proj.weight": WeightRef("layers/attention/out/kernel"),
    "h.{}.attn.c_proj.bias": WeightRef("layers/attention/out/bias"),
    "h.{}.ln_2.weight": WeightRef("layers/norm_2/scale"),
    "h.{}.ln_2.bias": WeightRef("layers/norm_2/bias"),
    "h.{}.mlp.c_fc.weight": WeightRef("layers/mlp/up/kernel"),
    "h.{}.mlp.c_fc.bias": WeightRef("layers/mlp/up/bias"),
    "h.{}.mlp.c_proj.weight": WeightRef("layers/mlp/down/kernel"),
    "h.{}.mlp.c_proj.bias": WeightRef("layers/mlp/down/bias"),
    "ln_f.weight": WeightRef("norm/scale"),
    "ln_f.bias": WeightRef("norm/bias"),
}

NANOGPT: Table = {
    f"transformer.{name}": ref._replace(form="transposed") if "kernel" in ref.name else ref
    for name, ref in GPT2.items()
}

# Llama, Mistral, Qwen2 (which adds biases to q, k and v) and Qwen3 (which normalizes q and k).
LLAMA: Table = {
    "model.embed_tokens.weight": WeightRef("token_embedding/embedding"),
    "model.layers.{}.input_layernorm.weight": WeightRef("layers/norm_1/scale"),
    "model.layers.{}.self_attn.q_proj.weight": linear("layers/attention/q"),
    "model.layers.{}.self_attn.q_proj.bias": WeightRef("layers/attention/q/bias"),
    "model.layers.{}.self_attn.k_proj.weight": linear("layers/attention/kv", 0),
    "model.layers.{}.self_attn.k_proj.bias": WeightRef("layers/attention/kv/bias", part=0),
    "model.layers.{}.self_attn.v_proj.weight": linear("layers/attention/kv", 1),
    "model.layers.{}.self_attn.v_proj.bias": WeightRef("layers/attention/kv/bias", part=1),
    "model.layers.{}.self_attn.q_norm.weight": WeightRef("layers/attention/q_norm/scale"),
    "model.layers.{}.self_attn.k_norm.weight": WeightRef("layers/attention/k_norm/scale"),
    "model.layers.{}.self_attn.o_proj.weight": linear("layers/attention/out"),
    "model.layers.{}.post_attention_layernorm.weight": WeightRef("layers/norm_2/scale"),
    "model.layers.{}.mlp.gate_proj.weight": linear("layers/mlp/gate_up", 0),
    "model.layers.{}.mlp.up_proj.weight": linear("layers/mlp/gate_up", 1),
    "model.layers.{}.mlp.down_proj.weight": linear("layers/mlp/down"),
    "model.norm.weight": WeightRef("norm/scale"),
    "lm_head.weight": WeightRef("head/embedding"),
}

# If the model has as many key-value heads as query heads, jaxgpt stores q, k and v as one weight.
LLAMA_EQUAL_HEADS: Table = LLAMA | {
    f"model.layers.{{}}.self_attn.{name}_proj.{kind}": WeightRef(
        f"layers/attention/qkv/{suffix}", form, part
    )
    for part, name in enumerate("qkv")
    for kind, suffix, form in (("weight", "kernel", "transposed"), ("bias", "bias", "same"))
}

# Gemma 3, which also normalizes the outputs of attention and MLP.
GEMMA3: Table = LLAMA | {
    "model.layers.{}.post_attention_layernorm.weight": WeightRef("layers/post_norm_1/scale"),
    "model.layers.{}.pre_feedforward_layernorm.weight": WeightRef("layers/norm_2/scale"),
    "model.layers.{}.post_feedforward_layernorm.weight": WeightRef("layers/post_norm_2/scale"),
}
GEMMA3_EQUAL_HEADS: Table = GEMMA3 | {
    name: ref for name, ref in LLAMA_EQUAL_HEADS.items() if ".self_attn." in name
}

# GPT in Megatron-LM and Megatron-DeepSpeed. The number in each entry is the dimension that is
# sharded over tensor-parallel ranks, or None for a replicated tensor.
MEGATRON: dict[str, tuple[WeightRef, int | None]] = {
    "embedding.word_embeddings.weight": (WeightRef("token_embedding/embedding"), 0),
    "embedding.position_embeddings.weight": (WeightRef("position_embedding/embedding"), None),
    "encoder.layers.{}.input_layernorm.weight": (WeightRef("layers/norm_1/scale"), None),
    "encoder.layers.{}.input_layernorm.bias": (WeightRef("layers/norm_1/bias"), None),
    "encoder.layers.{}.self_attention.query_key_value.weight": (
        WeightRef("layers/attention/qkv/kernel", "interleaved"),
        0,
    ),
    "encoder.layers.{}.self_attention.query_key_value.bias": (
        WeightRef("layers/attention/qkv/bias", "interleaved"),
        0,
    ),
    "encoder.layers.{}.self_attention.dense.weight": (linear("layers/attention/out"), 1),
    "encoder.layers.{}.self_attention.dense.bias": (WeightRef("layers/attention/out/bias"), None),
    "encoder.layers.{}.post_attention_layernorm.weight": (WeightRef("layers/norm_2/scale"), None),
    "encoder.layers.{}.post_attention_layernorm.bias": (WeightRef("layers/norm_2/bias"), None),
    "encoder.layers.{}.mlp.dense_h_to_4h.weight": (linear("layers/mlp/up"), 0),
    "encoder.layers.{}.mlp.dense_h_to_4h.bias": (WeightRef("layers/mlp/up/bias"), 0),
    "encoder.layers.{}.mlp.dense_4h_to_h.weight": (linear("layers/mlp/down"), 1),
    "encoder.layers.{}.mlp.dense_4h_to_h.bias": (WeightRef("layers/mlp/down/bias"), None),
    "encoder.final_layernorm.weight": (WeightRef("norm/scale"), None),
    "encoder.final_layernorm.bias": (WeightRef("norm/bias"), None),
    "output_layer.weight": (WeightRef("head/embedding"), 0),
}

# Maps parts of tensor names in other versions of Megatron to the corresponding parts in `MEGATRON`.
MEGATRON_SPELLINGS = {
    "language_model.": "",
    "transformer.layers.": "encoder.layers.",
    "transformer.final_layernorm.": "encoder.final_layernorm.",
    "decoder.": "encoder.",
    ".attention.": ".self_attention.",
    ".input_norm.": ".input_layernorm.",
    ".post_attention_norm.": ".post_attention_layernorm.",
    "encoder.final_norm.": "encoder.final_layernorm.",
    ".self_attention.linear_qkv.layer_norm_": ".input_layernorm.",
    ".mlp.linear_fc1.layer_norm_": ".post_attention_layernorm.",
    ".pre_mlp_layernorm.": ".post_attention_layernorm.",
    ".linear_qkv.": ".query_key_value.",
    ".linear_proj.": ".dense.",
    ".linear_fc1.": ".dense_h_to_4h.",
    ".linear_fc2.": ".dense_4h_to_h.",
}
