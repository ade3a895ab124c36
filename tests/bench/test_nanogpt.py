import json
import math

import jax
import numpy as np
import pytest
from flax import nnx

from jaxgpt.bench.nanogpt import check_same_device, nanogpt_weights
from jaxgpt.config import UsageError, load_config
from jaxgpt.models.transformer import GPT
from jobs import run
from stand_ins import SLOW, program

MODEL = ("model.n_layer=2", "model.n_head=2", "model.n_embd=32", "model.bias=True")


def test_weights_go_where_nanogpt_looks_for_them():
    """PyTorch's Linear computes x W^T, nanoGPT splits c_attn into q, k, v and those into heads."""
    config = load_config("tiny", *MODEL, "model.vocab_size=65").model
    model = GPT(config, rngs=nnx.Rngs(0))
    params = jax.device_get(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    weights = nanogpt_weights(params, config, 65)
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


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--nanogpt", "{tmp}", "--torch", "{ends}"), "has no model.py; give a clone"),
        (("--nanogpt", "{clone}", "--torch", "/none"), "--torch=/none: No such file"),
        (("--nanogpt", "{clone}", "--torch", "{ends}"), "nanoGPT fails (no torch here)"),
        (("--nanogpt", "{clone}", "--torch", "/bin/ls"), "nanoGPT fails ("),
        (
            ("--nanogpt", "{clone}", "--torch", "{ends}", "--steps", "9999999"),
            "are more than 1 GiB; give fewer",
        ),
        (
            ("--nanogpt", "{clone}", "--torch", "{ends}", "optimizer.name=lion"),
            "optimizer.name=lion: nanoGPT trains with adamw",
        ),
        (
            ("--nanogpt", "{clone}", "--torch", "{ends}", "model.position=rope"),
            "model.position=rope: nanoGPT has no such model",
        ),
    ],
)
def test_what_cannot_be_run_is_said_in_a_sentence(options, words, tmp_path):
    clone = tmp_path / "clone"
    clone.mkdir()
    (clone / "model.py").touch()
    ends = program(tmp_path / "ends", "#!/bin/sh\necho no torch here >&2\n")
    given = [word.format(tmp=tmp_path, clone=clone, ends=ends) for word in options]
    job = run("bench", "nanogpt", "--config", "tiny", *MODEL, "--steps", 1, *given)
    assert job.returncode == 2 and words in job.stdout
    assert "Traceback" not in job.stdout


def test_only_devices_of_one_kind_are_compared_and_one_gpu(monkeypatch):
    check_same_device("python", "cpu")
    with pytest.raises(UsageError, match="--torch=python: PyTorch is on cuda and JAX on cpu"):
        check_same_device("python", "cuda")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")  # the eight devices of the tests
    with pytest.raises(UsageError, match="shows 8 GPUs, .*; set CUDA_VISIBLE_DEVICES=0"):
        check_same_device("python", "cuda")


STILL = ("optimizer.learning_rate=1e-9", "optimizer.min_lr=0")


def test_times_and_losses_of_both_are_compared_step_by_step(tmp_path):
    (tmp_path / "model.py").touch()
    slow = program(tmp_path / "slow", SLOW)
    options = ("--steps", 2, "--rounds", 5, "--nanogpt", tmp_path, "--torch", slow, "--json")
    job = run(
        "bench", "nanogpt", "--config", "tiny", *MODEL, "train.log_interval=1", *STILL, *options
    )
    assert job.returncode == 0, job.stdout
    found = json.loads(job.stdout.splitlines()[-1])
    assert found["nanogpt"]["device"] == "abacus" and found["nanogpt_step_seconds"] == 1000
    assert found["losses_compared"] == found["losses"] == (5 + 1) * 2
    assert len(found["ratios"]) == 5 and found["step_seconds"] > 0
    assert found["loss_difference"] == pytest.approx(
        math.log(found["vocab_sizes"][0]), rel=0.02
    )  # ours, untrained
