"""train.layers_every: values of each layer, compared with NumPy on the checkpoints of the run."""

import math

import numpy as np
import pytest

from jaxgpt.config import MeshShape, UsageError, load_config, mesh_shape, parse_args
from jaxgpt.data.dataset import open_dataset
from jaxgpt.data.loader import Loader
from jaxgpt.parallel.mesh import make_mesh
from jaxgpt.parallel.sharding import batch_sharding
from jaxgpt.train.jitted import make_steps
from jobs import SMALL, checkpoint_arrays, limited_devices, records, train_here

PLAIN_SGD = (
    "optimizer.name=sgd",
    "optimizer.momentum=0",
    "optimizer.weight_decay=0",
    "optimizer.grad_clip=0",
    "optimizer.schedule=constant",
    "optimizer.warmup_iters=0",
    "optimizer.learning_rate=0.5",
)
RUN = (
    *SMALL, *PLAIN_SGD, "model.n_layer=3", "model.dropout=0.1", "train.max_iters=2",
    "train.layers_every=2", "checkpoint.interval=1", "checkpoint.keep=10",
)  # fmt: skip


def norms(arrays):
    """Return the norm of each layer over all arrays, which are stacked over the layers."""
    return np.sqrt(sum(np.square(x).reshape(len(x), -1).sum(axis=1) for x in arrays.values()))


def params_of(directory, step):
    """Return the parameters of a checkpoint by their names in models/DETAILS.md."""
    arrays = checkpoint_arrays(directory, step)
    return {
        name.replace("']['", "/").split("params/")[1].removesuffix("']"): array.astype(np.float64)
        for name, array in arrays.items()
        if "params" in name
    }


def layers_of(params):
    return {name: array for name, array in params.items() if name.startswith("layers/")}


def normalized(x, scale):
    x = x - x.mean(axis=-1, keepdims=True)
    return x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + 1e-5) * scale


def block_outputs(w, tokens):
    """Yield the output of each block of GPT-2 without biases and dropout, in NumPy."""
    T = tokens.shape[1]
    x = w["token_embedding/embedding"][tokens] + w["position_embedding/embedding"][:T]
    for i in range(len(w["layers/norm_1/scale"])):
        layer = {name: array[i] for name, array in layers_of(w).items()}
        qkv = np.einsum(
            "btd,dphk->pbhtk",
            normalized(x, layer["layers/norm_1/scale"]),
            layer["layers/attention/qkv/kernel"],
        )
        scores = np.einsum("bhtk,bhsk->bhts", qkv[0], qkv[1]) / math.sqrt(qkv.shape[-1])
        scores = np.exp(np.where(np.tri(T, dtype=bool), scores, -np.inf))
        mixed = np.einsum("bhts,bhsk->bthk", scores / scores.sum(-1, keepdims=True), qkv[2])
        x = x + np.einsum("bthk,hkd->btd", mixed, layer["layers/attention/out/kernel"])
        hidden = normalized(x, layer["layers/norm_2/scale"]) @ layer["layers/mlp/up/kernel"]
        gelu = 0.5 * hidden * (1 + np.vectorize(math.erf)(hidden / math.sqrt(2)))
        x = x + gelu @ layer["layers/mlp/down/kernel"]
        yield x


def batch_of(step, *args):
    """Return the token IDs (B, T) of a step."""
    config = parse_args(list(args))
    dataset = open_dataset(config.data, config.model)
    with limited_devices(1):
        mesh = make_mesh(mesh_shape(config))
    loader = Loader.for_training(dataset, config, batch_sharding(mesh))
    return np.asarray(loader.batch(step))[:, :-1]


@pytest.mark.parametrize(
    "mesh",
    [
        ("1,2,2", "parallel.zero_stage=3", "train.gradient_accumulation_steps=2"),
        ("2,1,2", "parallel.sequence_parallel=True"),
        ("data=2,context=2", "parallel.context_impl=ring", "model.dropout=0"),
        ("stage=2,tensor=2", "train.gradient_accumulation_steps=4"),
        ("stage=1,fsdp=2", "parallel.scan_layers=True", "parallel.remat=full"),
    ],
    ids=lambda mesh: mesh[0],
)
def test_values_are_those_of_the_checkpoints(tmp_path, mesh):
    train_here(*RUN, "--out", tmp_path, "--mesh", *mesh)
    lr = {r["step"]: r["lr"] for r in records(tmp_path)}
    (record,) = records(tmp_path, "layers")
    assert record["step"] == 2
    before, after = params_of(tmp_path, 1), params_of(tmp_path, 2)
    # Plain SGD subtracts the gradient times the learning rate.
    gradients = {name: (before[name] - after[name]) / lr[2] for name in before}
    outputs = block_outputs(before, batch_of(2, *RUN))
    expected = {
        "weight_norm": norms(layers_of(before)),
        "grad_norm": norms(layers_of(gradients)),
        "activation_rms": [np.sqrt(np.square(x_BTD).mean()) for x_BTD in outputs],
    }
    for name, values in expected.items():
        assert list(record[name]) == ["000", "001", "002"]
        tolerance = 1e-3 if name == "grad_norm" else 1e-5
        np.testing.assert_allclose(list(record[name].values()), values, rtol=tolerance)


def test_gradients_in_host_memory_are_refused():
    with pytest.raises(UsageError, match=r"train.layers_every=5: not possible.*offload=moments"):
        load_config(
            "tiny", "train.layers_every=5", "parallel.offload=state", "parallel.scan_layers=True"
        )


def test_a_step_may_have_more_activations_than_int32_can_count():
    sizes = ("model.n_layer=1", "model.n_embd=256", "model.block_size=4096")
    config = load_config("tiny", *sizes, "train.batch_size=4096", "train.layers_every=1")
    with limited_devices(1):
        steps = make_steps(config.replace(model__vocab_size=256), make_mesh(MeshShape()))
        steps.lower_train_step()
