"""The scripts that train jaxgpt beside other programs."""

import json
import math
import os
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

import hugging_face
import nanogpt
from jaxgpt.config import UsageError, load_config
from jaxgpt.data.dataset import open_dataset
from jaxgpt.data.loader import Loader
from jaxgpt.models.transformer import GPT
from jobs import run
from side_by_side import check_same_device, peer_weights

HERE = Path(__file__).parent
TORCH, CLONE = os.environ.get("JAXGPT_TORCH"), os.environ.get("JAXGPT_NANOGPT")
SMALL = ("model.n_layer=2", "model.n_head=2", "model.n_embd=32", "model.bias=True")
# Answers like torch_worker.py, for a model that takes 1,000 s per step and whose loss is 0, and
# keeps the batches.
SLOW = f"""#!{sys.executable}
import json, shutil, sys
print(json.dumps({{"torch": "0", "threads": 3, "device": "abacus"}}), flush=True)
for number, line in enumerate(sys.stdin):
    shutil.copy(sys.argv[-1] + "/batches.npy", __file__ + str(number))
    losses = [0.0] * len(json.loads(line))
    print(json.dumps({{"seconds": 1000.0, "losses": losses}}), flush=True)
"""


def program(path, text):
    path.write_text(text)
    path.chmod(0o755)
    return path


def weights_of(script, config):
    params = nnx.to_pure_dict(nnx.state(GPT(config, rngs=nnx.Rngs(0)), nnx.Param))
    return params, peer_weights(params, config, script.describe(config)[1])


def test_nanogpt_finds_every_weight_in_its_layout():
    """PyTorch's Linear computes x W^T; nanoGPT splits c_attn into q, k, v and then into heads."""
    config = load_config("tiny", *SMALL, "model.vocab_size=65").model
    params, weights = weights_of(nanogpt, config)
    shapes = {name: array.shape for name, array in weights.items() if ".h.1." in name}
    assert shapes == {
        "transformer.h.1.ln_1.weight": (32,),
        "transformer.h.1.ln_1.bias": (32,),
        "transformer.h.1.attn.c_attn.weight": (96, 32),
        "transformer.h.1.attn.c_attn.bias": (96,),
        "transformer.h.1.attn.c_proj.weight": (32, 32),
        "transformer.h.1.attn.c_proj.bias": (32,),
        "transformer.h.1.ln_2.weight": (32,),
        "transformer.h.1.ln_2.bias": (32,),
        "transformer.h.1.mlp.c_fc.weight": (128, 32),
        "transformer.h.1.mlp.c_fc.bias": (128,),
        "transformer.h.1.mlp.c_proj.weight": (32, 128),
        "transformer.h.1.mlp.c_proj.bias": (32,),
    }
    x = np.arange(32, dtype=np.float32)
    q, k, v = np.split(weights["transformer.h.1.attn.c_attn.weight"] @ x, 3)
    kernel = params["layers"]["attention"]["qkv"]["kernel"][1]
    for ours, theirs in zip(np.einsum("d,dchk->chk", x, kernel), (q, k, v), strict=True):
        np.testing.assert_allclose(theirs.reshape(2, 16), ours, rtol=1e-5, atol=1e-5)


def test_transformers_finds_every_weight_in_its_layout():
    config = load_config("llama-tiny", "model.vocab_size=65", "model.n_embd=32").model
    params, weights = weights_of(hugging_face, config)
    assert weights["model.embed_tokens.weight"].shape == weights["lm_head.weight"].shape == (65, 32)
    kv = params["layers"]["attention"]["kv"]["kernel"][1]
    x = np.arange(32, dtype=np.float32)
    for part, name in enumerate(("k_proj", "v_proj")):
        found = weights[f"model.layers.1.self_attn.{name}.weight"] @ x
        expected = np.einsum("d,dhk->hk", x, kv[:, part]).reshape(-1)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("script", "config", "setting"),
    [(nanogpt, "tiny", "position=rope"), (hugging_face, "llama-tiny", "mlp=relu2")],
)
def test_a_model_that_the_peer_lacks_is_refused(script, config, setting):
    with pytest.raises(UsageError, match=f"model.{setting}"):
        script.describe(load_config(config, f"model.{setting}").model)


@pytest.mark.parametrize(
    ("script", "options", "words"),
    [
        ("nanogpt.py", ("--repo", "{tmp}", "--torch", "{ends}"), "has no model.py; give a clone"),
        ("nanogpt.py", ("--repo", "{clone}", "--torch", "/none"), "--torch=/none: No such file"),
        ("nanogpt.py", ("--repo", "{clone}", "--torch", "{ends}"), "fails (no torch here)"),
        ("hugging_face.py", ("--torch", "/bin/ls"), "transformers fails ("),
        ("hugging_face.py", ("--torch", "{ends}", "optimizer.name=lion"), "trains with adamw"),
        ("speedrun.py", ("--repo", "{clone}", "--torch", "{ends}"), "has no train"),
    ],
)
def test_bad_input_is_answered_with_a_sentence(script, options, words, tmp_path):
    clone = tmp_path / "clone"
    clone.mkdir()
    (clone / "model.py").touch()
    ends = program(tmp_path / "ends", "#!/bin/sh\necho no torch here >&2\n")
    given = [word.format(tmp=tmp_path, clone=clone, ends=ends) for word in options]
    job = run(HERE / script, *given)
    assert job.returncode == 2 and words in job.stdout
    assert "Traceback" not in job.stdout


def test_both_programs_must_use_the_cpu_or_one_gpu(monkeypatch):
    check_same_device("python", "cpu")
    with pytest.raises(UsageError, match="--torch=python: PyTorch is on cuda and JAX on cpu"):
        check_same_device("python", "cuda")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")  # the eight devices of the tests
    with pytest.raises(UsageError, match="shows 8 GPUs, .*; set CUDA_VISIBLE_DEVICES=0"):
        check_same_device("python", "cuda")


def test_times_and_losses_of_both_programs_are_compared_step_by_step(tmp_path):
    (tmp_path / "model.py").touch()
    slow = program(tmp_path / "slow", SLOW)
    untrained = ("train.log_interval=1", "optimizer.learning_rate=1e-9", "optimizer.min_lr=0")
    options = ("--steps", 2, "--rounds", 5, "--repo", tmp_path, "--torch", slow, "--json")
    job = run(HERE / "nanogpt.py", "--config", "tiny", *SMALL, *untrained, *options)
    assert job.returncode == 0, job.stdout
    found = json.loads(job.stdout.splitlines()[-1])
    assert found["peer"]["device"] == "abacus" and found["peer_step_seconds"] == 1000
    assert found["losses_compared"] == (5 + 1) * 2
    assert len(found["ratios"]) == 5 and found["step_seconds"] > 0
    # The peer's loss is 0 and ours is that of an untrained model of bytes.
    assert found["loss_difference"] == pytest.approx(math.log(256), rel=0.02)
    given = np.concatenate([np.load(f"{slow}{number}") for number in range(6)])
    config = load_config("tiny")
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    loader = Loader.for_training(open_dataset(config.data, config.model), config, sharding)
    for step, rows in enumerate(given, 1):
        np.testing.assert_array_equal(rows, loader.batch(step))


@pytest.mark.long
@pytest.mark.skipif(TORCH is None, reason="JAXGPT_TORCH names no Python with transformers")
@pytest.mark.parametrize("script", ["nanogpt.py", "hugging_face.py"])
def test_losses_equal_those_of_the_peer(script):
    repo = ()
    if script == "nanogpt.py":
        if CLONE is None:
            pytest.skip("JAXGPT_NANOGPT names no clone of nanoGPT")
        repo = ("--repo", CLONE)
    options = ("--steps", 2, "--rounds", 2, "train.log_interval=1", "--json")
    config = "tiny" if script == "nanogpt.py" else "llama-tiny"
    job = run(HERE / script, "--config", config, "--torch", TORCH, *repo, *options)
    assert job.returncode == 0, job.stdout
    found = json.loads(job.stdout.splitlines()[-1])
    assert found["losses_compared"] == 6 and found["loss_difference"] < 1e-4
