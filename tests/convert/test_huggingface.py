"""Hand-made transformers folders: where each tensor goes, and which folders are rejected."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from jaxgpt.checkpoint.metadata import read_meta
from jaxgpt.config import UsageError, config_from_dict
from jaxgpt.convert import families, huggingface, safetensors
from jaxgpt.convert.__main__ import main
from jaxgpt.convert.safetensors import WEIGHTS_FILE, SafeTensor
from jaxgpt.data.tokenizers import SentencePieceTokenizer
from jobs import checkpoint_arrays

package = pytest.importorskip("safetensors.numpy")
V, D, H, G, K, F, L, T = 50, 24, 6, 2, 4, 40, 2, 16
LLAMA = {
    "model_type": "llama", "hidden_size": D, "num_hidden_layers": L, "num_attention_heads": H,
    "num_key_value_heads": G, "intermediate_size": F, "vocab_size": V, "hidden_act": "silu",
    "max_position_embeddings": T, "rms_norm_eps": 1e-5, "rope_theta": 5e5,
    "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8,
    },
}  # fmt: skip
GEMMA3 = LLAMA | {
    "model_type": "gemma3_text", "head_dim": 10, "query_pre_attn_scalar": 10, "sliding_window": 7,
    "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True, "rope_theta": 1e6,
    "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "sliding_window_pattern": 2,
}  # fmt: skip
NESTED = {"full_attention": {"rope_theta": 5e5}, "sliding_attention": None}  # transformers 5
GPT2 = {
    "model_type": "gpt2",
    "n_layer": L,
    "n_head": H,
    "n_embd": D,
    "n_positions": T,
    "vocab_size": V,
}


def llama_shapes(config):
    """Return the shapes of the tensors of a Llama, Mistral or Qwen model in transformers."""
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    size = config.get("head_dim", D // heads)
    out = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    if not config.get("tie_word_embeddings"):
        out["lm_head.weight"] = (V, D)
    for i in range(L):
        at = f"model.layers.{i}"
        for name, rows in (("q", heads), ("k", groups), ("v", groups)):
            out[f"{at}.self_attn.{name}_proj.weight"] = (rows * size, D)
            if config["model_type"] == "qwen2":
                out[f"{at}.self_attn.{name}_proj.bias"] = (rows * size,)
        if config["model_type"] in ("qwen3", "gemma3_text"):
            out |= {f"{at}.self_attn.{name}_norm.weight": (size,) for name in "qk"}
        out[f"{at}.self_attn.o_proj.weight"] = (D, heads * size)
        out |= {f"{at}.mlp.{name}_proj.weight": (F, D) for name in ("gate", "up")}
        out[f"{at}.mlp.down_proj.weight"] = (D, F)
        out[f"{at}.input_layernorm.weight"] = out[f"{at}.post_attention_layernorm.weight"] = (D,)
        if config["model_type"] == "gemma3_text":
            for name in ("pre", "post"):
                out[f"{at}.{name}_feedforward_layernorm.weight"] = (D,)
    return out


def gpt2_shapes(config):
    out = {"wte.weight": (V, D), "wpe.weight": (T, D), "ln_f.weight": (D,), "ln_f.bias": (D,)}
    for i in range(L):
        for name, shape in (
            ("ln_1", (D,)), ("attn.c_attn", (D, 3 * D)), ("attn.c_proj", (D, D)), ("ln_2", (D,)),
            ("mlp.c_fc", (D, 4 * D)), ("mlp.c_proj", (4 * D, D)),
        ):  # fmt: skip
            out |= {f"h.{i}.{name}.weight": shape, f"h.{i}.{name}.bias": shape[-1:]}
    return out


FAMILIES = {
    "llama": LLAMA,
    "llama of equal heads": LLAMA | {"num_key_value_heads": H, "tie_word_embeddings": True},
    "mistral": LLAMA | {"model_type": "mistral", "rope_scaling": None, "sliding_window": 5},
    "qwen2": LLAMA | {"model_type": "qwen2", "tie_word_embeddings": True, "sliding_window": 7},
    "qwen2 with windows": LLAMA
    | {
        "model_type": "qwen2",
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        "use_sliding_window": True,
        "sliding_window": 7,
        "max_window_layers": 1,
    },
    "qwen3": LLAMA | {"model_type": "qwen3", "head_dim": 10},
    "gemma3": GEMMA3,
    "gemma3 of equal heads": GEMMA3
    | {
        "num_key_value_heads": H,
        "query_pre_attn_scalar": 9,
        "final_logit_softcapping": 3.0,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "gpt2": GPT2,
}


def random_tensors(config, dtype=np.float32):
    draw = np.random.default_rng(0).normal
    shapes = (gpt2_shapes if config["model_type"] == "gpt2" else llama_shapes)(config)
    return {name: draw(size=shape).astype(dtype) for name, shape in shapes.items()}


def write(folder, config=LLAMA, given=None, **more):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | more))
    found = random_tensors(config) if given is None else given
    package.save_file(found, folder / WEIGHTS_FILE)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_come_back_as_they_went(family, tmp_path):
    given = write(tmp_path / "a", FAMILIES[family])
    main(["from-hf", str(tmp_path / "a"), "--out", str(tmp_path / "ours")])
    main(["to-hf", "--run", str(tmp_path / "ours"), "--out", str(tmp_path / "b")])
    prefix = "transformer." if family == "gpt2" else ""
    found = package.load_file(tmp_path / "b" / WEIGHTS_FILE)
    assert found.keys() == {prefix + name for name in given}
    for name, array in given.items():
        np.testing.assert_array_equal(found[prefix + name], array)
    # Import the export again: config.json describes the same model.
    main(["from-hf", str(tmp_path / "b"), "--out", str(tmp_path / "again")])
    first, second = (read_meta(tmp_path / name, 0) for name in ("ours", "again"))
    assert first["config"] == second["config"] and first["checksums"] == second["checksums"]


def test_a_llamas_tensors_go_where_its_layers_look_for_them(tmp_path):
    """Compare each weight with the formula of torch's Linear, x W^T, split into heads."""
    given = write(tmp_path / "a")
    main(["from-hf", str(tmp_path / "a"), "--out", str(tmp_path / "ours")])
    found = {
        path.removeprefix("['params']").replace("']['", "/").strip("[']"): array
        for path, array in checkpoint_arrays(tmp_path / "ours", 0).items()
    }
    x = np.random.default_rng(1).normal(size=D).astype(np.float32)

    def theirs(name, layer=1):
        return given[f"model.layers.{layer}.{name}.weight"]

    attention, mlp = "layers/attention", "layers/mlp"
    for ours, name in (
        (found[f"{attention}/q/kernel"][1], "self_attn.q_proj"),
        (found[f"{attention}/kv/kernel"][1][:, 0], "self_attn.k_proj"),
        (found[f"{attention}/kv/kernel"][1][:, 1], "self_attn.v_proj"),
        (found[f"{mlp}/gate_up/kernel"][1][:, 0], "mlp.gate_proj"),
        (found[f"{mlp}/gate_up/kernel"][1][:, 1], "mlp.up_proj"),
    ):
        expected = (theirs(name) @ x).reshape(ours.shape[1:])
        np.testing.assert_allclose(np.tensordot(x, ours, 1), expected, rtol=1e-4, atol=1e-4)
    heads_HK = np.random.default_rng(2).normal(size=(H, K)).astype(np.float32)
    np.testing.assert_allclose(
        np.tensordot(heads_HK, found[f"{attention}/out/kernel"][1], 2),
        theirs("self_attn.o_proj") @ heads_HK.reshape(-1), rtol=1e-4, atol=1e-4,
    )  # fmt: skip
    np.testing.assert_array_equal(found[f"{mlp}/down/kernel"][1], theirs("mlp.down_proj").T)
    np.testing.assert_array_equal(
        found["layers/norm_2/scale"][0], theirs("post_attention_layernorm", 0)
    )
    embedding = found["token_embedding/embedding"]
    np.testing.assert_array_equal(embedding[:V], given["model.embed_tokens.weight"])
    assert embedding.shape == (128, D) and not embedding[V:].any()
    np.testing.assert_array_equal(found["head/embedding"][:V], given["lm_head.weight"])


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_is_read_and_bfloat16_written(dtype, tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors, "SHARD_BYTES", 5000)
    given = write(tmp_path / "a", given=random_tensors(LLAMA, dtype))
    main(["from-hf", str(tmp_path / "a"), "--out", str(tmp_path / "ours")])
    huggingface.to_hf(tmp_path / "ours", None, tmp_path / "b", "bfloat16")
    assert len(list((tmp_path / "b").glob("model-*-of-*.safetensors"))) > 2
    found = huggingface.open_folder(tmp_path / "b")
    for name, array in given.items():
        expected = array.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(found[name].read(), expected)
    assert json.loads((tmp_path / "b" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_tensors_that_are_no_weights_are_left_out(tmp_path):
    given = random_tensors(GPT2)
    given = {f"transformer.{name}": array for name, array in given.items()}
    given |= {
        "lm_head.weight": given["transformer.wte.weight"],
        "transformer.h.0.attn.bias": np.ones((1, 1, T, T), np.uint8),
        "transformer.h.1.attn.masked_bias": np.float32([-1e4]),
    }
    write(tmp_path / "a", GPT2, given)
    main(["from-hf", str(tmp_path / "a"), "--out", str(tmp_path / "ours")])
    model = config_from_dict(read_meta(tmp_path / "ours", 0)["config"], "ours").model
    assert model.mlp == "gelu_tanh" and model.bias and model.block_size == T


def refused(arguments, capsys):
    """Return the one-line error of a command that exits with status 2."""
    with pytest.raises(SystemExit) as end:
        main(list(map(str, arguments)))
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gemma2"}, "model_type gemma2 is not supported, only gpt2, llama, mistral"),
        ({"model_type": "mixtral"}, "model_type mixtral is not supported"),
        ({"model_type": "qwen3_moe", "num_experts": 8}, "qwen3_moe (mixture of experts) is not"),
        ({"model_type": None}, "model_type None is not supported"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type yarn is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "rope type linear has no factor"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope type llama3 has no factor, low_freq"),
        ({"rope_scaling": 3}, "rope_scaling is 3; it must be a single flat object"),
        ({"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters and rope_scaling differ"),
        ({"rope_scaling": None, "rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
            "rope_parameters is {'full_attention'"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types chunked_attention"),
        ({"model_type": "mistral", "rope_scaling": None, "layer_types": ["full_attention"]},
            "layer_types full_attention are not supported, only sliding_attention"),
        ({"model_type": ["llama"]}, "model_type ['llama'] is not supported"),
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        ({"mlp_bias": True}, "mlp_bias=True is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act=gelu is not supported, only silu"),
        ({"num_hidden_layers": None}, "num_hidden_layers is None; it must be a whole number above"),
        ({"num_attention_heads": "six"}, "num_attention_heads is six"),
        ({"num_key_value_heads": 4}, "model.n_kv_head=4: must divide model.n_head=6"),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 0,
            "max_window_layers": 1}, "sliding_window is 0; it must be a whole number"),
        ({"is_causal": False}, "is_causal=False is not supported, only True"),
        ({"original_max_position_embeddings": 5},
            "original_max_position_embeddings=5 differs from the one in rope_scaling; remove the"),
        (GEMMA3 | {"rope_parameters": NESTED}, "rope_scaling differs from full_attention in rope_"),
        (GEMMA3 | {"rope_scaling": None, "rope_parameters": {"rope_theta": 77.0}},
            "it must have the objects full_attention and sliding_attention"),
        (GEMMA3 | {"rope_scaling": None,
            "rope_parameters": NESTED | {"sliding_attention": {"type": "linear", "factor": 4.0}}},
            "rope type linear of sliding_attention is not supported, only default"),
        ({"model_type": "qwen3", "layer_types": ["sliding_attention"]},
            "layer_types has 1 entries for num_hidden_layers=2; give one for each layer"),
        ({"model_type": "gpt2"}, "n_layer is None"),
        ({"intermediate_size": 41}, "mlp.down_proj.weight has shape (24, 40), but the "
            "configuration requires (24, 41)"),
        ({"num_hidden_layers": 2**40}, "num_hidden_layers is 1099511627776; it must be at most"),
        ({"num_hidden_layers": 3}, "has no model.layers.2."),
        ({"num_hidden_layers": 1}, "has tensors that do not fit the model: model.layers.1."),
        ({"num_hidden_layers": 500}, "has 21 tensors, too few for 500 layers"),
        ({"hidden_size": 6 * 10**29}, "model.n_embd=600000000000000000000000000000: must be"),
        ({"vocab_size": 2**40}, "model.vocab_size=1099511627776: must be"),
        ({"rms_norm_eps": -1.0}, "model.norm_eps=-1.0: must be a finite number, more than 0"),
        ({"rope_theta": "x"}, "model.rope_theta=x: must be a finite number"),
        ({"tie_word_embeddings": 1.5}, "tie_word_embeddings=1.5 is not supported"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_named(changes, words, tmp_path, capsys):
    write(tmp_path / "a", **changes)
    line = refused(["from-hf", tmp_path / "a", "--out", tmp_path / "ours"], capsys)
    assert words in line
    assert not (tmp_path / "ours").exists()


TRAINED = "original_max_position_embeddings"


@pytest.mark.parametrize(
    ("config", "changes", "options"),
    [
        # As transformers 5.24 reads them.
        (LLAMA, {"rope_scaling": {"type": "linear", "factor": 2.0, "rope_theta": 50.0}},
            {"rope_theta": 50.0, "rope_scaling": (2.0,)}),
        (LLAMA, {"rope_scaling": {k: v for k, v in LLAMA["rope_scaling"].items() if k != TRAINED},
            TRAINED: 8}, {"rope_scaling": (8.0, 1.0, 4.0, 8.0)}),
        (LLAMA | {"model_type": "qwen2"},
            {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": None},
            {"sliding_window": None, "layers": ()}),
        (LLAMA | {"model_type": "qwen2"}, {"use_sliding_window": True, "max_window_layers": 1},
            {"sliding_window": 4096, "layers": ("global", "local")}),
        (GEMMA3, {"rope_scaling": None, "rope_parameters": NESTED, "rope_local_base_freq": 50.0},
            {"rope_theta": 5e5, "rope_scaling": (), "local_rope_theta": 50.0}),
    ],
)  # fmt: skip
def test_a_setting_in_an_unusual_place_counts(config, changes, options, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    model = families.read_model(tmp_path)
    assert {key: getattr(model, key) for key in options} == options


@pytest.mark.parametrize(
    ("family", "remedy"),
    [
        ("llama of equal heads", "set tie_word_embeddings to false in config.json"),
        ("gpt2", "jaxgpt needs one matrix for both, as in GPT-2"),
    ],
)
def test_an_output_layer_that_is_not_the_embedding_is_refused(family, remedy, tmp_path, capsys):
    given = random_tensors(FAMILIES[family])
    write(tmp_path / "a", FAMILIES[family], given | {"lm_head.weight": np.ones((V, D), np.float32)})
    line = refused(["from-hf", tmp_path / "a", "--out", tmp_path / "ours"], capsys)
    assert "lm_head.weight is not the token embedding" in line
    assert line.endswith(f"but the model ties them; {remedy}")


def test_a_tensor_cut_off_while_it_is_read_leaves_nothing(tmp_path, capsys, monkeypatch):
    write(tmp_path / "a")

    def ends(*_):
        raise UsageError("the disk is gone")

    monkeypatch.setattr(SafeTensor, "read", ends)
    assert "the disk is gone" in refused(
        ["from-hf", tmp_path / "a", "--out", tmp_path / "ours"], capsys
    )
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_conversion_that_is_interrupted_leaves_nothing(tmp_path, monkeypatch):
    write(tmp_path / "a")

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(huggingface.WeightsWriter, "close", interrupted)
    with pytest.raises(KeyboardInterrupt):
        huggingface.from_hf(tmp_path / "a", tmp_path / "ours")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("kind", ["from-hf", "to-hf"])
def test_a_full_disk_leaves_nothing(kind, tmp_path, capsys, monkeypatch):
    write(tmp_path / "a")
    main(["from-hf", str(tmp_path / "a"), "--out", str(tmp_path / "ours")])
    arguments = {
        "from-hf": ["from-hf", tmp_path / "a"],
        "to-hf": ["to-hf", "--run", tmp_path / "ours"],
    }
    capsys.readouterr()

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(huggingface.WeightsWriter, "write", full)
        patched.setattr(huggingface, "write_folder", full)
        line = refused([*arguments[kind], "--out", tmp_path / "new"], capsys)
        assert f"--out {tmp_path / 'new'}: the disk is full; free some space" in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "ours"]


def test_what_is_there_is_not_written_over(tmp_path, capsys):
    write(tmp_path / "a")
    line = refused(["from-hf", tmp_path / "a", "--out", tmp_path / "a"], capsys)
    assert "exists and is not an empty folder; choose another folder with --out" in line
    (tmp_path / "empty").mkdir()
    main(["from-hf", str(tmp_path / "a"), "--out", str(tmp_path / "empty")])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["from-hf", "/nowhere", "--out", "{tmp}/x"], "/nowhere: is not a folder"),
        (["to-hf", "--run", "/nowhere", "--out", "x"], "/nowhere: no such folder"),
        (["to-hf", "--run", "{tmp}/ours", "--step", 3, "--out", "x"], "step 3: "),
        (["to-hf", "--run", "a", "--dtype", "int8", "--out", "x"], "invalid choice: 'int8'"),
        (["to-nanogpt", "--run", "{tmp}/ours", "--out", "x"], "does not support model.n_kv_head=2"),
        (["from-hf", "{tmp}/a"], "are required: --out"),
        ([], "are required: KIND"),
    ],
)  # fmt: skip
def test_convert_explains_what_is_wrong(arguments, words, tmp_path, capsys):
    write(tmp_path / "a")
    main(["from-hf", str(tmp_path / "a"), "--out", str(tmp_path / "ours")])
    capsys.readouterr()
    assert words in refused([str(word).format(tmp=tmp_path) for word in arguments], capsys)


def test_a_folder_without_a_tokenizer_json_gets_one(tmp_path, data_home, capsys):
    tied = LLAMA | {"vocab_size": 256, "tie_word_embeddings": True}
    given = random_tensors(tied) | {"model.embed_tokens.weight": np.ones((256, D), np.float32)}
    write(tmp_path / "a", tied, given)
    words = ["from-hf", str(tmp_path / "a"), "--tokenizer", str(data_home / "python")]
    main([*words, "--out", str(tmp_path / "ours")])
    assert read_meta(tmp_path / "ours", 0)["tokenizer"] == {"type": "byte"}
    write(tmp_path / "b")
    capsys.readouterr()
    words[1] = tmp_path / "b"
    assert "has 256 tokens, but the model has 50" in refused([*words, "--out", "x"], capsys)


def test_the_given_tokenizer_replaces_the_one_in_the_folder(tmp_path, monkeypatch):
    write(tmp_path / "a")
    (tmp_path / "a" / "tokenizer.model").write_bytes(b"old")
    given = SentencePieceTokenizer(b"new", 2, None)
    monkeypatch.setattr(huggingface, "read_tokenizer", lambda *_: given)
    huggingface.from_hf(tmp_path / "a", tmp_path / "ours", tokenizer=Path("given"))
    assert (tmp_path / "ours" / "tokenizer.model").read_bytes() == b"new"


def test_an_exported_tokenizer_adds_no_special_tokens_because_training_does_not(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "a": 1}))
    made.add_special_tokens(["<s>"])
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    write(tmp_path / "a")
    made.save(str(tmp_path / "a" / "tokenizer.json"))
    huggingface.from_hf(tmp_path / "a", tmp_path / "ours")
    huggingface.to_hf(tmp_path / "ours", None, tmp_path / "b", "float32")
    exported = tokenizers.Tokenizer.from_file(str(tmp_path / "b" / "tokenizer.json"))
    assert (made.encode("a").ids, exported.encode("a").ids) == ([0, 1], [1])


def test_a_model_of_more_layers_than_can_be_unrolled_is_read(tmp_path):
    write(tmp_path, LLAMA | {"num_hidden_layers": 600}, {})
    assert families.read_model(tmp_path).n_layer == 600


@pytest.mark.parametrize("base", [LLAMA, GEMMA3], ids=["llama", "gemma3"])
def test_a_model_whose_width_its_heads_do_not_divide_is_refused(base, tmp_path, capsys):
    config = base | {"num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 4}
    write(tmp_path / "a", config)
    main(["from-hf", str(tmp_path / "a"), "--out", str(tmp_path / "ours")])
    capsys.readouterr()
    line = refused(["to-hf", "--run", tmp_path / "ours", "--out", tmp_path / "b"], capsys)
    assert "has model.n_embd=24 (not a multiple of n_head=5)" in line


def test_a_context_may_be_kept_shorter(tmp_path, capsys):
    write(tmp_path / "a")
    main(["from-hf", str(tmp_path / "a"), "--block-size", "8", "--out", str(tmp_path / "ours")])
    assert read_meta(tmp_path / "ours", 0)["config"]["model"]["block_size"] == 8
    with pytest.raises(UsageError, match="model.block_size=0"):
        huggingface.read_model(tmp_path / "a", 0)
    write(tmp_path / "b", GPT2)
    line = refused(["from-hf", tmp_path / "b", "--block-size", 8, "--out", tmp_path / "x"], capsys)
    assert "--block-size: needs rotary positions; set model.block_size" in line
