import json
import os

import jax
import numpy as np
import pytest
from flax import nnx

from jaxgpt.bench.transformers import transformers_model
from jaxgpt.config import UsageError, load_config
from jaxgpt.models.transformer import GPT
from jobs import run

SHAPE = ("model.vocab_size=65", "model.n_layer=2", "model.n_embd=32", "model.n_head=4")
TORCH = os.environ.get("JAXGPT_TORCH")


def test_weights_go_where_transformers_looks_for_them():
    model = load_config("llama-tiny", *SHAPE, "model.mlp_hidden=48").model
    network = GPT(model, rngs=nnx.Rngs(0))
    params = jax.device_get(nnx.to_pure_dict(nnx.state(network, nnx.Param)))
    config, arrays = transformers_model(params, model)
    assert config["model_type"] == "llama" and config["num_key_value_heads"] == 2
    assert arrays["model.embed_tokens.weight"].shape == arrays["lm_head.weight"].shape == (65, 32)
    kv = params["layers"]["attention"]["kv"]["kernel"][1]
    x = np.arange(32, dtype=np.float32)
    for part, name in enumerate(("k_proj", "v_proj")):
        found = arrays[f"model.layers.1.self_attn.{name}.weight"] @ x
        expected = np.einsum("d,dhk->hk", x, kv[:, part]).reshape(-1)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_a_model_that_transformers_lacks_is_a_sentence():
    model = load_config("llama-tiny", *SHAPE, "model.mlp=relu2").model
    with pytest.raises(UsageError, match="model.mlp=relu2"):
        transformers_model({}, model)


@pytest.mark.long
@pytest.mark.skipif(TORCH is None, reason="JAXGPT_TORCH names no Python with transformers")
def test_losses_are_those_of_transformers():
    options = ("--steps", 2, "--rounds", 2, "train.log_interval=1", "--json")
    job = run("bench", "transformers", "--config", "llama-tiny", "--torch", TORCH, *options)
    assert job.returncode == 0, job.stdout
    found = json.loads(job.stdout.splitlines()[-1])
    assert found["losses_compared"] == 6 and found["loss_difference"] < 1e-4
