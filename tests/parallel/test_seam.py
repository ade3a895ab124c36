"""The mesh axis that the folder's README adds."""

import pytest

from jaxgpt.config import mesh
from jobs import SMALL, records, train_here
from readme_code import load_block


@pytest.fixture
def replica(monkeypatch, tmp_path):
    monkeypatch.setattr(mesh, "AXES", mesh.AXES.copy())
    load_block("jaxgpt/parallel/README.md", "replica", tmp_path)


def losses(out):
    return [r["loss"] for r in records(out)]


def test_it_trains_saves_and_moves_to_another_mesh(replica, tmp_path):
    settings = (*SMALL, "train.max_iters=4", "checkpoint.interval=4")
    assert train_here(*settings, "--out", tmp_path / "data", "--mesh", "4,1,1") == 0
    assert train_here(*settings, "--out", tmp_path / "new", "--mesh", "data=2,replica=2") == 0
    assert losses(tmp_path / "new") == pytest.approx(losses(tmp_path / "data"), rel=1e-6)
    for out, shape in (("new", "1,2,2"), ("data", "fsdp=2,replica=2")):
        out = tmp_path / out
        assert train_here("--out", out, "--mesh", shape, "train.max_iters=6") == 0
    assert losses(tmp_path / "new") == pytest.approx(losses(tmp_path / "data"), rel=1e-6)


@pytest.mark.parametrize(
    ("axis", "like", "options"),
    [("heads_2", "tensor", ["parallel.sequence_parallel=True"]), ("shards_2", "fsdp", [])],
)
def test_two_axes_may_have_the_same_role(monkeypatch, tmp_path, axis, like, options):
    """Four devices along two axes compute what four along one do."""
    monkeypatch.setitem(mesh.AXES, axis, mesh.AXES[like])
    for out, shape in (("one", f"{like}=4"), ("two", f"{like}=2,{axis}=2")):
        settings = ("train.max_iters=3", "checkpoint.interval=0", "--mesh", shape)
        assert train_here(*SMALL, *settings, *options, "--out", tmp_path / out) == 0
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-6)
