"""Checkpoints with Megatron's names and shapes; `test_references` compares logits."""

import argparse
import enum
import sys
import types

import numpy as np
import pytest

import torch_files
from jaxgpt.checkpoint.metadata import read_meta
from jaxgpt.config import UsageError
from jaxgpt.convert.megatron import from_megatron
from jobs import checkpoint_arrays

torch = pytest.importorskip("torch")
D, H, K, L, T, V, PADDED = 24, 4, 6, 4, 16, 50, 64
ARGUMENTS = {
    "num_layers": L, "num_attention_heads": H, "hidden_size": D, "max_position_embeddings": T,
    "ffn_hidden_size": 4 * D, "kv_channels": K,
}  # fmt: skip
# Arguments about the model with the defaults of each code base (their arguments.py at
# NVIDIA/Megatron-LM d98e8a6 and microsoft/Megatron-DeepSpeed f4157be).
SAVED_BY = {
    "Megatron-LM": {
        "normalization": "LayerNorm", "norm_epsilon": 1e-5, "position_embedding_type":
        "learned_absolute", "use_rotary_position_embeddings": False, "rotary_percent": 1.0,
        "rotary_base": 10000, "add_position_embedding": True, "group_query_attention": False,
        "num_query_groups": 1, "swiglu": False, "squared_relu": False, "quick_geglu": False,
        "openai_gelu": False, "bias_gelu_fusion": True, "add_bias_linear": True,
        "add_qkv_bias": False, "apply_layernorm_1p": False, "num_experts": None,
        "window_size": None, "window_attn_skip_freq": None, "multi_latent_attention": False,
        "untie_embeddings_and_output_weights": False, "apply_residual_connection_post_layernorm":
        False, "virtual_pipeline_model_parallel_size": None, "padded_vocab_size": PADDED,
        "data_path": ["1.0", "/data/a"], "recompute_modules": ["core_attn"],
    },
    "Megatron-DeepSpeed": {
        "normalization": "layernorm", "layernorm_epsilon": 1e-5, "num_key_value_heads": H,
        "use_rotary_position_embeddings": False, "rope_theta": 10000, "rotary_percent": 1.0,
        "add_position_embedding": True, "swiglu": False, "squared_relu": False,
        "openai_gelu": False, "bias_gelu_fusion": True, "add_bias_linear": True, "num_experts": [1],
        "mlp_type": "standard", "topk": 1, "apply_layernorm_1p": False,
        "untie_embeddings_and_output_weights": False, "apply_residual_connection_post_layernorm":
        False, "virtual_pipeline_model_parallel_size": None, "padded_vocab_size": PADDED,
        "data_path": ["/data/a"], "deepspeed": True, "zero_stage": 1,
    },
}  # fmt: skip
# Shape of each tensor in a layer, and the dimension that is sharded over ranks.
LAYER = {
    "input_layernorm.weight": ((D,), None),
    "input_layernorm.bias": ((D,), None),
    "self_attention.query_key_value.weight": ((3 * D, D), 0),
    "self_attention.query_key_value.bias": ((3 * D,), 0),
    "self_attention.dense.weight": ((D, D), 1),
    "self_attention.dense.bias": ((D,), None),
    "post_attention_layernorm.weight": ((D,), None),
    "post_attention_layernorm.bias": ((D,), None),
    "mlp.dense_h_to_4h.weight": ((4 * D, D), 0),
    "mlp.dense_h_to_4h.bias": ((4 * D,), 0),
    "mlp.dense_4h_to_h.weight": ((D, 4 * D), 1),
    "mlp.dense_4h_to_h.bias": ((D,), None),
}


def whole_model():
    draw = np.random.default_rng(0).normal
    shapes = {f"layers.{i}.{name}": shape for i in range(L) for name, (shape, _) in LAYER.items()}
    shapes |= {"words": (PADDED, D), "positions": (T, D)}
    shapes |= {"final_layernorm.weight": (D,), "final_layernorm.bias": (D,)}
    return {name: draw(size=shape).astype(np.float32) for name, shape in shapes.items()}


def save(folder, model, tensor=2, pipeline=1, deepspeed=False, arguments=(), head=None, **more):
    """Write the files of all ranks."""
    for stage in range(pipeline):
        for rank in range(tensor):
            own = {}
            for number in range(L // pipeline):
                for name, (_, dim) in LAYER.items():
                    array = model[f"layers.{number + stage * L // pipeline}.{name}"]
                    part = array if dim is None else np.split(array, tensor, dim)[rank]
                    own[f"layers.{number}.{name}"] = np.ascontiguousarray(part)
            language_model = {"encoder": own}
            if stage == pipeline - 1:
                own |= {name: array for name, array in model.items() if name.startswith("final")}
                if head is not None:
                    language_model["output_layer"] = {"weight": np.split(head, tensor)[rank]}
            if stage == 0:
                words = np.split(model["words"], tensor)[rank]
                language_model["embedding"] = {
                    "word_embeddings": {"weight": words},
                    "position_embeddings": {"weight": model["positions"]},
                }
            state = {
                "args": argparse.Namespace(**(ARGUMENTS | dict(arguments))),
                "checkpoint_version": 3.0,
                "module" if deepspeed else "model": {"language_model": language_model},
            }
            if deepspeed:
                at = folder / f"mp_rank_{rank:02}_model_states.pt"
            else:
                suffix = f"_{stage:03}" if pipeline > 1 else ""
                at = folder / f"mp_rank_{rank:02}{suffix}" / "model_optim_rng.pt"
            at.parent.mkdir(parents=True, exist_ok=True)
            torch_files.save(at, state | more)


def arrays_of(folder):
    return {
        path.removeprefix("['params']").replace("']['", "/").strip("[']"): array
        for path, array in checkpoint_arrays(folder, 0).items()
    }


@pytest.mark.parametrize(
    ("tensor", "pipeline", "deepspeed"), [(1, 1, False), (2, 1, False), (2, 2, False), (4, 1, True)]
)
def test_the_parts_of_ranks_are_put_together(tensor, pipeline, deepspeed, tmp_path):
    model = whole_model()
    save(tmp_path / "iter_0000012", model, tensor, pipeline, deepspeed)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("12\n")
    from_megatron(tmp_path, tmp_path / "ours")
    found = arrays_of(tmp_path / "ours")
    for layer in range(L):
        qkv = model[f"layers.{layer}.self_attention.query_key_value.weight"]
        for head in range(H):  # rows of a head: its q, its k, its v
            for part in range(3):
                rows = qkv[(3 * head + part) * K :][:K]
                ours = found["layers/attention/qkv/kernel"][layer][:, part, head]
                np.testing.assert_array_equal(ours, rows.T)
        bias = model[f"layers.{layer}.self_attention.query_key_value.bias"]
        np.testing.assert_array_equal(
            found["layers/attention/qkv/bias"][layer], bias.reshape(H, 3, K).swapaxes(0, 1)
        )
        for theirs, ours in (
            ("self_attention.dense", "attention/out"),
            ("mlp.dense_h_to_4h", "mlp/up"),
            ("mlp.dense_4h_to_h", "mlp/down"),
        ):
            kernel = found[f"layers/{ours}/kernel"][layer].reshape(
                -1, D if "up" not in ours else 4 * D
            )
            np.testing.assert_array_equal(kernel, model[f"layers.{layer}.{theirs}.weight"].T)
            np.testing.assert_array_equal(
                found[f"layers/{ours}/bias"][layer], model[f"layers.{layer}.{theirs}.bias"]
            )
    np.testing.assert_array_equal(found["token_embedding/embedding"][:PADDED], model["words"])
    np.testing.assert_array_equal(found["norm/bias"], model["final_layernorm.bias"])


@pytest.mark.parametrize("arguments", SAVED_BY.values(), ids=SAVED_BY)
def test_the_arguments_that_each_code_base_saves_are_read(arguments, tmp_path):
    save(tmp_path / "it", whole_model(), 1, deepspeed="deepspeed" in arguments, arguments=arguments)
    from_megatron(tmp_path / "it", tmp_path / "ours")
    model = read_meta(tmp_path / "ours", 0)["config"]["model"]
    assert (model["n_layer"], model["n_head"], model["mlp"]) == (L, H, "gelu_tanh")
    assert (model["norm"], model["norm_eps"], model["position"]) == ("layernorm", 1e-5, "learned")


def test_members_of_megatrons_enumerations_are_read_as_their_values(tmp_path, monkeypatch):
    module = types.ModuleType("megatron.core.enums")
    module.Kind = enum.Enum("Kind", {"rope": "rope", "auto": 5}, module=module.__name__)
    with monkeypatch.context() as patched:  # the module exists only while the files are saved
        for name in ("megatron", "megatron.core", module.__name__):
            patched.setitem(sys.modules, name, module)
        for folder, key, value in (
            ("a", "attention_backend", module.Kind.auto),
            ("b", "position_embedding_type", module.Kind.rope),
        ):
            save(tmp_path / folder, whole_model(), 1, arguments={key: value})
    from_megatron(tmp_path / "a", tmp_path / "ours")
    with pytest.raises(UsageError, match="position_embedding_type=rope is not supported"):
        from_megatron(tmp_path / "b", tmp_path / "no")


def test_an_output_layer_of_the_last_stage_is_the_embedding_unless_untied(tmp_path):
    model = whole_model()
    for name, untied in (("tied", False), ("untied", True)):
        arguments = {"untie_embeddings_and_output_weights": untied}
        head = model["words"] + 1 if untied else model["words"]
        save(tmp_path / name, model, 2, 2, arguments=arguments, head=head)
        from_megatron(tmp_path / name, tmp_path / f"{name}_ours")
    assert "head/embedding" not in arrays_of(tmp_path / "tied_ours")
    found = arrays_of(tmp_path / "untied_ours")
    np.testing.assert_array_equal(found["head/embedding"][:PADDED], model["words"] + 1)
    np.testing.assert_array_equal(found["token_embedding/embedding"][:PADDED], model["words"])


def test_names_of_newer_versions_are_the_same_weights(tmp_path):
    model = whole_model()
    save(tmp_path / "old", model, 1)
    flat = {
        "embedding.word_embeddings.weight": model["words"],
        "embedding.position_embeddings.weight": model["positions"],
        "decoder.final_layernorm.weight": model["final_layernorm.weight"],
        "decoder.final_layernorm.bias": model["final_layernorm.bias"],
    }
    spelled = {
        "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
        "post_attention_layernorm.": "mlp.linear_fc1.layer_norm_",
        "query_key_value": "linear_qkv", "dense_h_to_4h": "linear_fc1",
        "dense_4h_to_h": "linear_fc2", "self_attention.dense": "self_attention.linear_proj",
    }  # fmt: skip
    for name, array in model.items():
        if name.startswith("layers."):
            for old, new in spelled.items():
                name = name.replace(old, new)
            flat[f"decoder.{name}"] = array
    flat["decoder.layers.0.mlp.linear_fc1._extra_state"] = None
    state = {"args": argparse.Namespace(**ARGUMENTS), "checkpoint_version": 3.0, "model": flat}
    (tmp_path / "new" / "mp_rank_00").mkdir(parents=True)
    torch_files.save(tmp_path / "new" / "mp_rank_00" / "model_optim_rng.pt", state)
    for name in ("old", "new"):
        from_megatron(tmp_path / name, tmp_path / f"{name}_ours")
    old, new = (arrays_of(tmp_path / f"{name}_ours") for name in ("old", "new"))
    for name, array in old.items():
        np.testing.assert_array_equal(new[name], array)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"swiglu": True}, "swiglu=True is not supported"),
        ({"normalization": "RMSNorm"}, "normalization=RMSNorm is not supported, only LayerNorm"),
        ({"position_embedding_type": "rope"}, "position_embedding_type=rope is not supported"),
        ({"num_experts": 8}, "num_experts=8 is not supported"),
        ({"num_experts": [1, 8]}, r"num_experts=\[1, 8\] is not supported"),
        ({"num_experts": [[2]]}, r"num_experts=\[None\] is not supported"),
        ({"window_size": (128, 0)}, r"window_size=\[128, 0\] is not supported"),
        ({"use_alibi_position_embeddings": True}, "use_alibi_position_embeddings=True"),
        ({"hidden_size": None}, "its args have no hidden_size"),
        ({"num_layers": 5}, "has no encoder.layers.4."),
        ({"ffn_hidden_size": 50}, "has shape"),
    ],
)
def test_what_is_not_supported_is_named(arguments, words, tmp_path):
    save(tmp_path / "iter_0000001", whole_model(), 1, arguments=arguments)
    with pytest.raises(UsageError, match=words):
        from_megatron(tmp_path / "iter_0000001", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def nested(depth):
    """Return nested dictionaries that share their children: few bytes, but 2^depth names."""
    found = {"w": torch.ones(1)}
    for _ in range(depth):
        found = {"a": found, "b": found}
    return found


def contains_itself():
    model = {}
    model["language_model"] = model
    return model


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (contains_itself(), "appears twice"),
        (nested(18), "appears twice"),
        ({"a" * 10**4: {"w": torch.ones(1)}}, "with a name that Megatron does not use"),
    ],
)
def test_a_file_of_endless_names_is_refused(model, words, tmp_path):
    (tmp_path / "mp_rank_00").mkdir()
    state = {"args": argparse.Namespace(**ARGUMENTS), "checkpoint_version": 3.0, "model": model}
    torch.save(state, tmp_path / "mp_rank_00" / "model_optim_rng.pt")
    with pytest.raises(UsageError, match=words):
        from_megatron(tmp_path, tmp_path / "ours")


def test_rows_that_pad_the_vocabulary_are_left_out_with_a_tokenizer(tmp_path, data_home):
    model = whole_model() | {"words": np.ones((320, D), np.float32)}
    save(tmp_path / "iter_0000001", model)
    from_megatron(tmp_path / "iter_0000001", tmp_path / "ours", data_home / "python")
    embedding = arrays_of(tmp_path / "ours")["token_embedding/embedding"]
    assert embedding.shape == (256, D) and embedding.all()
    with pytest.raises(UsageError, match="has 256 tokens, but the model has 64"):
        save(tmp_path / "small", whole_model())
        from_megatron(tmp_path / "small", tmp_path / "no", data_home / "python")


def test_folders_that_are_not_whole_are_refused(tmp_path):
    folder = tmp_path / "iter_0000001"
    with pytest.raises(UsageError, match="is not a folder; give one with mp_rank_00"):
        from_megatron(folder, tmp_path / "ours")
    folder.mkdir()
    with pytest.raises(UsageError, match="has no mp_rank_"):
        from_megatron(folder, tmp_path / "ours")
    (folder / "__0_0.distcp").touch()
    with pytest.raises(UsageError, match="save it with --ckpt-format torch"):
        from_megatron(folder, tmp_path / "ours")
    save(folder, whole_model(), 2)
    (folder / "mp_rank_00" / "model_optim_rng.pt").unlink()
    with pytest.raises(UsageError, match="has no mp_rank_00_000; all ranks are needed"):
        from_megatron(folder, tmp_path / "ours")
    save(folder, whole_model(), 2)
    save(tmp_path / "wide", whole_model() | {"words": np.ones((128, D), np.float32)}, 2)
    file = "mp_rank_01/model_optim_rng.pt"
    (tmp_path / "wide" / file).replace(folder / file)
    with pytest.raises(UsageError, match="word_embeddings.weight has a different shape on another"):
        from_megatron(folder, tmp_path / "ours")
    save(folder, whole_model(), 2, checkpoint_version=1.0)
    with pytest.raises(UsageError, match="has checkpoint_version 1.0; it must be 2 or later"):
        from_megatron(folder, tmp_path / "ours")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("../../etc")
    with pytest.raises(UsageError, match="which is not in this folder"):
        from_megatron(tmp_path, tmp_path / "ours")
    (tmp_path / "latest_checkpointed_iteration.txt").unlink()
    (tmp_path / "latest").symlink_to("/proc/self/mem")  # reading it is an I/O error
    with pytest.raises(UsageError, match="latest: cannot be read .Input/output error"):
        from_megatron(tmp_path, tmp_path / "ours")
