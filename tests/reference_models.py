"""Random models of transformers and nanoGPT, with their saved files and results."""

import argparse
import json
import sys

import numpy as np
import pytest
from safetensors.torch import load_file

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
T, V, STEPS = 64, 96, 5
LLAMA = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 112,
    "vocab_size": V, "max_position_embeddings": T, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
ROPE = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
}  # fmt: skip
GEMMA3 = LLAMA | {
    "num_hidden_layers": 5, "num_key_value_heads": 1, "head_dim": 24, "query_pre_attn_scalar": 10,
    "sliding_window": 6, "rope_theta": 2e4, "rope_local_base_freq": 500.0,
    "sliding_window_pattern": 3, "tie_word_embeddings": True, "pad_token_id": None,
}  # fmt: skip
GPT2 = {"n_layer": 2, "n_head": 4, "n_embd": 64, "n_positions": T, "vocab_size": V}
NO_DROPOUT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
FAMILIES = {
    "gpt2": (
        transformers.GPT2Config,
        GPT2 | NO_DROPOUT | {"bos_token_id": None, "eos_token_id": None},
    ),
    "llama3": (
        transformers.LlamaConfig,
        LLAMA | {"num_key_value_heads": 2, "rope_parameters": ROPE, "tie_word_embeddings": True},
    ),
    "tinyllama": (transformers.LlamaConfig, LLAMA | {"num_key_value_heads": 4}),
    "mistral": (
        transformers.MistralConfig,
        LLAMA | {"num_key_value_heads": 2, "sliding_window": 8},
    ),
    "qwen2": (
        transformers.Qwen2Config,
        LLAMA | {"num_key_value_heads": 2, "tie_word_embeddings": True},
    ),
    "qwen2_windows": (
        transformers.Qwen2Config,
        LLAMA
        | {
            "num_hidden_layers": 4,
            "num_key_value_heads": 2,
            "use_sliding_window": True,
            "sliding_window": 7,
            "max_window_layers": 3,
        },
    ),
    "gemma3": (transformers.Gemma3TextConfig, GEMMA3),
    "gemma3_scaled": (
        transformers.Gemma3TextConfig,
        GEMMA3
        | {
            "num_hidden_layers": 7,
            "num_key_value_heads": 4,
            "tie_word_embeddings": False,
            "query_pre_attn_scalar": 24,
            "final_logit_softcapping": 4.0,
            "sliding_window": 40,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e4},
                "sliding_attention": {"rope_type": "default", "rope_theta": 3e3},
            },
        },
    ),
    "qwen3": (transformers.Qwen3Config, LLAMA | {"num_key_value_heads": 2, "head_dim": 24}),
}


def randomize(model):
    """Change every weight, so that none keeps its initial value of 0 or 1."""
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * torch.randn_like(weight)


def batches():
    return torch.from_numpy(np.random.default_rng(0).integers(0, V, (STEPS, 8, T + 1)))


def train(model, logits_of):
    """Return the losses of five AdamW steps with clipping, and decay of matrices and embeddings."""
    weights = list(model.parameters())
    groups = [
        {"params": [w for w in weights if w.dim() > 1], "weight_decay": 0.1},
        {"params": [w for w in weights if w.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
    losses = []
    for rows in batches():
        logits = logits_of(rows[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def save_transformers(folder):
    """Save a model of each family; return its logits and its losses in five steps by family."""
    found = {}
    for family, (config, options) in FAMILIES.items():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config(**options))
        randomize(model)
        model.save_pretrained(folder / family)
        with torch.no_grad():
            logits = model(batches()[0, :, :-1]).logits.numpy()
        found[family] = logits, train(model, lambda tokens, model=model: model(tokens).logits)
    return found


def run_transformers(folder):
    """Return the logits and greedy text of a model that jaxgpt wrote."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).to(torch.float32)
    with torch.no_grad():
        logits = model(batches()[0, :, :-1]).logits.numpy()
    text = model.generate(batches()[0, :1, :4], max_new_tokens=50, do_sample=False, pad_token_id=0)
    return logits, text[0, 4:].numpy()


def nanogpt_code(clone):
    """Return nanoGPT's model.py."""
    sys.path.insert(0, str(clone))
    try:
        import model
    finally:
        sys.path.remove(str(clone))
    return model


def save_nanogpt(folder, clone):
    """Save a ckpt.pt as train.py does under torch.compile, one without biases, and Megatron's
    layouts of the first; return the logits and loss of each ckpt.pt."""
    code, found = nanogpt_code(clone), {}
    for name, bias in (("nanogpt", True), ("nanogpt_plain", False)):
        arguments = {
            "n_layer": 2, "n_head": 4, "n_embd": 64, "block_size": T, "bias": bias,
            "vocab_size": V, "dropout": 0.0,
        }  # fmt: skip
        torch.manual_seed(0)
        model = code.GPT(code.GPTConfig(**arguments))
        randomize(model)
        (folder / name).mkdir()
        prefix = "_orig_mod." if bias else ""
        optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), "cpu")
        rows = batches()[0]
        inputs, targets = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        model(inputs, targets)[1].backward()
        state = {
            "model": {prefix + key: value.clone() for key, value in model.state_dict().items()},
            "model_args": arguments,
            "iter_num": 7,
            "best_val_loss": torch.tensor(1e9),
            "config": {"device": "cpu", "learning_rate": 1e-3},
        }
        if bias:
            save_megatron(folder / "megatron", model.state_dict(), 2, 1)
            save_megatron(folder / "megatron_pipeline", model.state_dict(), 1, 2)
        with torch.no_grad():
            logits, loss = model(inputs, targets)
        optimizer.step()
        state["optimizer"] = optimizer.state_dict()
        torch.save(state, folder / name / "ckpt.pt")
        found[name] = logits.numpy(), loss.item()
    return found


def save_megatron(folder, weights, n_tensor, n_pipeline):
    """Save nanoGPT's weights as the ranks of Megatron-LM would."""
    H, K, D, L = 4, 16, 64, 2

    def parts(x, dim):
        return torch.chunk(x, n_tensor, dim)

    def by_heads(x):  # (3 H K, ...) -> (H 3 K, ...)
        return x.reshape(3, H, K, -1).transpose(0, 1).reshape(x.shape)

    arguments = argparse.Namespace(
        num_layers=L, num_attention_heads=H, hidden_size=D, max_position_embeddings=T,
        ffn_hidden_size=4 * D, kv_channels=K, bias_gelu_fusion=False, norm_epsilon=1e-5,
        params_dtype=torch.float32, position_embedding_type="learned_absolute",
    )  # fmt: skip
    padded = torch.cat([weights["transformer.wte.weight"], torch.ones(128 - V, D)])
    for stage in range(n_pipeline):
        for rank in range(n_tensor):
            layers = {}
            own = range(stage * L // n_pipeline, (stage + 1) * L // n_pipeline)
            for number, layer in enumerate(own):
                w = {
                    key.removeprefix(f"transformer.h.{layer}."): value
                    for key, value in weights.items()
                }
                for theirs, ours, dim in (
                    ("input_layernorm", "ln_1", None), ("post_attention_layernorm", "ln_2", None),
                    ("self_attention.query_key_value", "attn.c_attn", 0),
                    ("self_attention.dense", "attn.c_proj", 1),
                    ("mlp.dense_h_to_4h", "mlp.c_fc", 0), ("mlp.dense_4h_to_h", "mlp.c_proj", 1),
                ):  # fmt: skip
                    for kind in ("weight", "bias"):
                        x = w[f"{ours}.{kind}"]
                        x = by_heads(x) if "c_attn" in ours else x
                        split = dim is not None and (kind == "weight" or dim == 0)
                        x = parts(x, dim)[rank] if split else x
                        layers[f"layers.{number}.{theirs}.{kind}"] = x.clone()
            if stage == n_pipeline - 1:
                for kind in ("weight", "bias"):
                    layers[f"final_layernorm.{kind}"] = weights[f"transformer.ln_f.{kind}"].clone()
            model = {"encoder": layers}
            if stage == 0:
                model["embedding"] = {
                    "word_embeddings": {"weight": parts(padded, 0)[rank].clone()},
                    "position_embeddings": {"weight": weights["transformer.wpe.weight"].clone()},
                }
            state = {
                "args": arguments, "checkpoint_version": 3.0, "iteration": 7,
                "model": {"language_model": model},
                "rng_state": [{"np": np.random.get_state(), "torch": torch.get_rng_state()}],
            }  # fmt: skip
            if n_pipeline > 1 and stage:
                state["model"]["word_embeddings_for_head"] = {"weight": parts(padded, 0)[rank]}
            suffix = f"_{stage:03}" if n_pipeline > 1 else ""
            at = folder / "iter_0000007" / f"mp_rank_{rank:02}{suffix}"
            at.mkdir(parents=True)
            torch.save(state, at / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("7")


def run_nanogpt(folder, clone):
    """Return the logits that nanoGPT's own code computes with a checkpoint from to-nanogpt."""
    code = nanogpt_code(clone)
    model = code.GPT(code.GPTConfig(**json.loads((folder / "model_args.json").read_text())))
    missing, unexpected = model.load_state_dict(
        load_file(folder / "model.safetensors"), strict=False
    )
    assert set(missing) <= {"lm_head.weight"} and not unexpected
    with torch.no_grad():
        rows = batches()[0]
        logits, _ = model(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
    return logits.numpy()
