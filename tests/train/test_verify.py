"""`train.verify_interval` compares the replicas of parameters on several devices."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxgpt.checkpoint.replicas import devices_that_differ, has_replicas
from jaxgpt.cluster import shutdown as exits
from jaxgpt.cluster.process_group import ProcessGroup
from jaxgpt.config import MeshShape, UsageError, load_config, mesh_shape
from jaxgpt.parallel.collectives import average_gradient
from jaxgpt.parallel.mesh import make_mesh
from jaxgpt.spikes.faults import flip_bit
from jaxgpt.train.jitted import make_steps
from jaxgpt.train.restart import DeviceFailed, after_corruption
from jobs import SMALL, checkpoint_arrays, limited_devices, losses, records, train_here

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


def test_gradients_that_differ_by_rounding_become_the_same_on_all_devices():
    """`tests/plan/test_theory.py` counts where a step does this."""
    with limited_devices(4):
        mesh = make_mesh(MeshShape(data=2, tensor=2))

    def gradient(x):
        _, backward = jax.vjp(lambda x: average_gradient(x, ("tensor",)), x)
        return backward(x + jax.lax.axis_index("tensor"))[0]

    # Without check_vma, because the ranks' gradients should be the same, and here they are not.
    on_each = jax.shard_map(
        gradient, mesh=mesh, in_specs=P(), out_specs=P("tensor"), check_vma=False
    )
    found = jax.jit(on_each)(np.arange(3.0))
    assert found.tolist() == [0.5, 1.5, 2.5] * 2


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


def test_only_restarts_from_the_same_checkpoint_count(tmp_path):
    cluster = ProcessGroup(launcher="none")
    job = SimpleNamespace(cluster=cluster, steps=SimpleNamespace(mesh=make_mesh(MeshShape(8))))
    run, earlier = SimpleNamespace(directory=tmp_path, config=load_config("tiny")), [24, 16, 8]
    for _ in range(3):
        assert after_corruption(run, job, [3], 30, earlier)[0] is None  # the initial state
    with pytest.raises(DeviceFailed, match="3 restarts from the same checkpoint"):
        after_corruption(run, job, [3], 30, earlier)
