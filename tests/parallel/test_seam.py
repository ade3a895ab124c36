"""The mesh axis that the room's README adds."""

import ast
import re
from pathlib import Path

import pytest

from jaxgpt.config.mesh_shape import AXES
from jobs import SMALL, records, train_here

README = Path(__file__).parents[2] / "jaxgpt/parallel/README.md"


@pytest.fixture
def replica(monkeypatch):
    (line,) = re.findall(r"^```python\n +(.*),\n```$", README.read_text(), re.MULTILINE)
    name, roles = re.fullmatch(r'"(\w+)": frozenset\((.*)\)', line).groups()
    monkeypatch.setitem(AXES, name, frozenset(ast.literal_eval(roles)))


def losses(out):
    return [r["loss"] for r in records(out)]


def test_it_trains_saves_and_moves_to_another_mesh(replica, tmp_path):
    settings = (*SMALL, "train.max_iters=4", "checkpoint.interval=4")
    assert train_here(*settings, "--out", tmp_path / "data", "--mesh", "4,1,1") == 0
    assert train_here(*settings, "--out", tmp_path / "new", "--mesh", "data=2,replica=2") == 0
    assert losses(tmp_path / "new") == pytest.approx(losses(tmp_path / "data"), rel=1e-6)
    for out, mesh in (("new", "1,2,2"), ("data", "fsdp=2,replica=2")):
        out = tmp_path / out
        assert train_here("--out", out, "--mesh", mesh, "train.max_iters=6") == 0
    assert losses(tmp_path / "new") == pytest.approx(losses(tmp_path / "data"), rel=1e-6)
