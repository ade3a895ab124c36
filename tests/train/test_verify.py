"""`train.verify_interval` compares the replicas of parameters on several devices."""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from jaxgpt.checkpoint.replicas import devices_that_differ, has_replicas
from jaxgpt.cluster import shutdown as exits
from jaxgpt.config import UsageError, load_config, mesh_shape
from jaxgpt.parallel.mesh import make_mesh
from jaxgpt.spikes.faults import flip_bit
from jaxgpt.train import setup
from jaxgpt.train.compiled import make_steps
from jobs import SMALL, checkpoint_arrays, losses, records, train_here

RUN = (*SMALL, "train.max_iters=20", "checkpoint.interval=8", "train.verify_interval=5")


def params_on(mesh):
    layers = ("model.n_layer=2", "train.gradient_accumulation_steps=2")
    config = load_config(*SMALL[1:], *layers, "model.vocab_size=64", "--mesh", mesh)
    return make_steps(config, make_mesh(mesh_shape(config))).init().params


@pytest.mark.parametrize(
    ("mesh", "device", "found"),
    [
        ("4,1,2", 5, [5]),  # outvoted by three
        ("2,1,4", 6, [2, 6]),  # of two nobody knows which
        ("4,2,1", 3, [3]),
        ("2,2,2", 0, [0, 4]),
        ("stage=2,context=4", 6, [6]),
        ("stage=2,context=2,tensor=2", 5, [5, 7]),
    ],
)
def test_a_flipped_bit_is_found_on_its_device(mesh, device, found):
    params = params_on(mesh)
    assert has_replicas(params) and devices_that_differ(params) == []
    assert devices_that_differ(flip_bit(params, device)) == found


def test_without_copies_there_is_nothing_to_compare():
    params = params_on("1,8,1")
    assert not has_replicas(params) and devices_that_differ(params) == []


@pytest.mark.parametrize(
    "remedy", ["", "parallel.sequence_parallel=True", "train.deterministic=True"]
)
def test_replicas_that_may_differ_by_rounding_are_refused_on_gpus(remedy, monkeypatch):
    settings = ("data.document_mask=True", "model.position=learned", "train.verify_interval=5")
    config = load_config("tiny", *settings, *remedy.split())
    gpu = SimpleNamespace(devices=np.array([SimpleNamespace(platform="gpu")]), shape={"tensor": 2})
    steps = SimpleNamespace(mesh=gpu, state_shapes=SimpleNamespace(params=None))
    monkeypatch.setattr(setup, "has_replicas", lambda params: True)
    with nullcontext() if remedy else pytest.raises(UsageError, match="may differ by rounding"):
        setup._check_copies(config, steps)


def test_a_mesh_without_copies_is_refused(tmp_path):
    with pytest.raises(
        UsageError, match=r"verify_interval=5: mesh data=1 fsdp=8 .* no replicas .* use data > 1"
    ):
        train_here(*RUN, "--mesh", "1,8,1", "--out", tmp_path)


def test_a_run_goes_back_and_ends_as_if_nothing_had_been_flipped(tmp_path):
    mesh = ("--mesh", "4,1,2")
    assert train_here(*RUN, *mesh, "--out", tmp_path / "clean") == exits.DONE
    fault = ("faults.bit_flip_step=12", "faults.bit_flip_device=5")
    assert train_here(*RUN, *mesh, *fault, "--out", tmp_path / "flipped") == exits.DONE
    (record,) = records(tmp_path / "flipped", "corruption")
    assert (record["step"], record["found"]) == (8, 15)
    assert record["devices"] == ["device 5 of the mesh (process 0 on host localhost)"]
    assert losses(tmp_path / "flipped") == losses(tmp_path / "clean")
    a, b = (checkpoint_arrays(tmp_path / name, 20) for name in ("flipped", "clean"))
    assert all((a[name] == b[name]).all() for name in b) and a.keys() == b.keys()


def test_a_device_that_differs_again_and_again_ends_the_run(tmp_path, monkeypatch, capsys):
    from jaxgpt.train import loop

    monkeypatch.setattr(loop, "devices_that_differ", lambda params: [3])
    assert train_here(*RUN, "--mesh", "4,1,2", "--out", tmp_path) == exits.FAILED
    said = capsys.readouterr().out
    assert "of device 3 of the mesh (process 0 on host localhost) differ from their rep" in said
    assert "3 restarts from the same" in said and len(records(tmp_path, "corruption")) == 3
