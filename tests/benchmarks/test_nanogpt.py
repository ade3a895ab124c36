import sys

import jax
import numpy as np
import pytest
from flax import nnx

from jaxgpt.benchmarks.nanogpt import nanogpt_weights
from jaxgpt.config import load_config
from jaxgpt.model.gpt import GPT
from jobs import run

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
    kernel = params["blocks"]["qkv"]["kernel"][1]
    for ours, theirs in zip(np.einsum("d,dchk->chk", x, kernel), (q, k, v), strict=True):
        np.testing.assert_allclose(theirs.reshape(2, 16), ours, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--nanogpt", "{tmp}", "--torch", sys.executable), "has no model.py; give a clone"),
        (("--nanogpt", "{clone}", "--torch", "/none"), "--torch=/none: cannot be started"),
        (("--nanogpt", "{clone}", "--torch", sys.executable), "nanoGPT has ended"),
    ],
)
def test_what_cannot_be_run_is_said_in_a_sentence(options, words, tmp_path):
    clone = tmp_path / "clone"
    clone.mkdir()
    (clone / "model.py").write_text("raise SystemExit('a model that ends')\n")
    given = [word.format(tmp=tmp_path, clone=clone) for word in options]
    job = run("bench", "nanogpt", "--config", "tiny", *MODEL, "--steps", 1, *given)
    assert job.returncode == 2 and words in job.stdout
    assert "Traceback" not in job.stdout
