"""Files with nanoGPT's names and shapes. `test_references` uses files from nanoGPT's own code."""

import json

import numpy as np
import pytest

import torch_files
from jaxgpt.checkpoint.metadata import read_meta
from jaxgpt.config import UsageError, config_from_dict
from jaxgpt.convert import nanogpt
from jaxgpt.convert.nanogpt import from_nanogpt, to_nanogpt
from jobs import checkpoint_arrays

package = pytest.importorskip("safetensors.numpy")
D, H, L, T, V = 24, 3, 2, 16, 50
ARGUMENTS = {
    "n_layer": L, "n_head": H, "n_embd": D, "block_size": T, "bias": True, "vocab_size": V,
    "dropout": 0.1,
}  # fmt: skip


def random_state(bias=True):
    draw = np.random.default_rng(0).normal
    shapes = {"wte.weight": (V, D), "wpe.weight": (T, D), "ln_f.weight": (D,), "ln_f.bias": (D,)}
    for i in range(L):
        for name, shape in (
            ("ln_1", (D,)), ("attn.c_attn", (3 * D, D)), ("attn.c_proj", (D, D)), ("ln_2", (D,)),
            ("mlp.c_fc", (4 * D, D)), ("mlp.c_proj", (D, 4 * D)),
        ):  # fmt: skip
            shapes |= {f"h.{i}.{name}.weight": shape, f"h.{i}.{name}.bias": shape[:1]}
    return {
        f"transformer.{name}": draw(size=shape).astype(np.float32)
        for name, shape in shapes.items()
        if bias or not name.endswith("bias")
    }


def save(path, state, arguments=ARGUMENTS):
    torch_files.save(
        path, {"model": state, "model_args": arguments, "iter_num": 3, "optimizer": {"state": {}}}
    )


@pytest.mark.parametrize("prefix", ["", "_orig_mod."])
@pytest.mark.parametrize("bias", [True, False])
def test_weights_come_back_as_they_went(prefix, bias, tmp_path):
    given = random_state(bias)
    tied = {"lm_head.weight": given["transformer.wte.weight"]}
    saved = {prefix + name: array for name, array in (given | tied).items()}
    save(tmp_path / "ckpt.pt", saved, ARGUMENTS | {"bias": bias})
    from_nanogpt(tmp_path / "ckpt.pt", tmp_path / "ours")
    model = config_from_dict(read_meta(tmp_path / "ours", 0)["config"], "ours").model
    assert (model.n_layer, model.n_head, model.vocab_size, model.bias) == (L, H, V, bias)
    qkv = checkpoint_arrays(tmp_path / "ours", 0)[
        "['params']['layers']['attention']['qkv']['kernel']"
    ]
    x = np.ones(D, np.float32)
    expected = given["transformer.h.1.attn.c_attn.weight"] @ x
    np.testing.assert_allclose(
        np.tensordot(x, qkv[1], 1).reshape(-1), expected, rtol=1e-4, atol=1e-4
    )
    to_nanogpt(tmp_path / "ours", None, tmp_path / "back", "float32")
    found = package.load_file(tmp_path / "back" / "model.safetensors")
    assert found.keys() == given.keys()
    for name, array in given.items():
        np.testing.assert_array_equal(found[name], array)
    arguments = json.loads((tmp_path / "back" / "model_args.json").read_text())
    assert arguments == ARGUMENTS | {"bias": bias, "dropout": 0.0}


def test_an_output_layer_that_is_not_the_embedding_is_refused(tmp_path):
    save(tmp_path / "ckpt.pt", random_state() | {"lm_head.weight": np.ones((V, D), np.float32)})
    with pytest.raises(UsageError, match=r"lm_head.weight is not the token embedding, but .*one"):
        from_nanogpt(tmp_path / "ckpt.pt", tmp_path / "ours")


def test_a_model_with_written_out_defaults_goes_back(tmp_path, monkeypatch):
    save(tmp_path / "ckpt.pt", random_state())
    checked = nanogpt.checked_model
    monkeypatch.setattr(nanogpt, "checked_model", lambda *given: checked(*given).explicit)
    from_nanogpt(tmp_path / "ckpt.pt", tmp_path / "ours")
    model = config_from_dict(read_meta(tmp_path / "ours", 0)["config"], "ours").model
    assert (model.n_kv_head, model.head_dim, model.mlp_hidden) == (H, D // H, 4 * D)
    to_nanogpt(tmp_path / "ours", None, tmp_path / "back", "float32")
    assert json.loads((tmp_path / "back" / "model_args.json").read_text())["n_embd"] == D


def test_a_tokenizer_may_be_given_to_it(tmp_path, data_home):
    save(tmp_path / "ckpt.pt", random_state())
    with pytest.raises(UsageError, match="has 256 tokens, but the model has 50"):
        from_nanogpt(tmp_path / "ckpt.pt", tmp_path / "ours", data_home / "python")
    state = random_state()
    state["transformer.wte.weight"] = np.ones((300, D), np.float32)
    save(tmp_path / "ckpt.pt", state, ARGUMENTS | {"vocab_size": 300})
    from_nanogpt(tmp_path / "ckpt.pt", tmp_path / "ours", data_home / "python")
    assert read_meta(tmp_path / "ours", 0)["tokenizer"] == {"type": "byte"}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"weights": {}}, "has no model and model_args"),
        ([1], "has no model and model_args"),
        ({"model": {}, "model_args": {"n_layer": 2}}, "its model_args have no n_head, n_embd"),
        ({"model": [1], "model_args": ARGUMENTS}, "its model is not a state_dict of tensors"),
        ({"model": {"x": 1}, "model_args": ARGUMENTS}, "its model is not a state_dict of tensors"),
        (
            {"model": {}, "model_args": ARGUMENTS},
            "has 0 tensors, too few for 2 layers",
        ),
        (
            {"model": random_state() | {"more": np.ones(1, np.float32)}, "model_args": ARGUMENTS},
            "has tensors that do not fit the model: more",
        ),
        (
            {"model": random_state(), "model_args": ARGUMENTS | {"n_embd": 48}},
            r"has shape \(24,\), but the configuration requires \(48,\)",
        ),
    ],
)
def test_other_files_are_refused(value, words, tmp_path):
    torch_files.save(tmp_path / "a.pt", value)
    with pytest.raises(UsageError, match=words):
        from_nanogpt(tmp_path / "a.pt", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()
