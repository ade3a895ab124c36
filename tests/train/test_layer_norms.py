"""train.layers_every: norms of each layer, compared with NumPy on the checkpoints of the run."""

import numpy as np
import pytest

from jaxgpt.config import UsageError, load_config
from jobs import SMALL, checkpoint_arrays, records, train_here

PLAIN_SGD = (
    "optimizer.name=sgd",
    "optimizer.momentum=0",
    "optimizer.weight_decay=0",
    "optimizer.grad_clip=0",
    "optimizer.schedule=constant",
    "optimizer.warmup_iters=0",
    "optimizer.learning_rate=0.5",
)


def norms(arrays):
    """Return the norm of each layer over all arrays, which are stacked over the layers."""
    return np.sqrt(sum(np.square(x).reshape(len(x), -1).sum(axis=1) for x in arrays.values()))


def layers_of(directory, step):
    arrays = checkpoint_arrays(directory, step)
    return {
        name: array.astype(np.float64)
        for name, array in arrays.items()
        if "params" in name and "layers" in name
    }


def test_norms_are_those_of_the_checkpoints(tmp_path):
    every_step = ("train.max_iters=2", "checkpoint.interval=1", "checkpoint.keep=10")
    settings = (*SMALL, "model.n_layer=3", *every_step, *PLAIN_SGD, "train.layers_every=2")
    train_here(*settings, "--out", tmp_path, "--mesh", "1,2,2")
    lr = {r["step"]: r["lr"] for r in records(tmp_path)}
    found = records(tmp_path, "layers")
    assert [r["step"] for r in found] == [2]
    for record in found:
        step = record["step"]
        before, after = layers_of(tmp_path, step - 1), layers_of(tmp_path, step)
        # Plain SGD subtracts the gradient times the learning rate.
        gradients = {name: (before[name] - after[name]) / lr[step] for name in before}
        assert list(record["weight_norm"]) == ["000", "001", "002"]
        weight_norms = list(record["weight_norm"].values())
        np.testing.assert_allclose(weight_norms, norms(before), rtol=1e-5)
        np.testing.assert_allclose(list(record["grad_norm"].values()), norms(gradients), rtol=1e-3)


def test_gradients_in_host_memory_are_refused():
    with pytest.raises(UsageError, match=r"train.layers_every=5: not possible.*offload=moments"):
        load_config(
            "tiny", "train.layers_every=5", "parallel.offload=state", "parallel.scan_layers=True"
        )
