"""A transformers folder evaluates to the same loss as the run that it was exported from."""

import contextlib
import json
import tempfile

import pytest

from jaxgpt.config import UsageError
from jaxgpt.convert.__main__ import main as convert_command
from jaxgpt.evaluate import trained
from jobs import SMALL, run, train_here

LLAMA = ("model.norm=rmsnorm", "model.position=rope", "model.mlp=swiglu", "model.n_kv_head=2")


@pytest.mark.long
def test_a_folder_of_transformers_has_the_loss_of_its_run(tmp_path):
    out, folder = tmp_path / "run", tmp_path / "hf"
    assert train_here(*SMALL, *LLAMA, "train.max_iters=5", "--out", out, "--mesh", "1,1,1") == 0
    convert_command(["to-hf", "--run", str(out), "--out", str(folder)])
    found = {}
    for where in (out, f"hf:{folder}"):
        job = run("evaluate", "--run", where, "data.dataset=python", "--json", "--mesh", "1,1,1")
        assert job.returncode == 0, job.stdout
        record = json.loads(job.stdout.splitlines()[-1])
        found[record["run"]] = record["loss"], record["tokens"]
    assert found.keys() == {str(out), f"hf:{folder}"} and len(set(found.values())) == 1


class Cluster:
    """The first process on the second of two hosts, which do not share folders."""

    local_rank, rank, hosts = 0, 1, (0, 1)

    def run_on_all(self, function):
        return function()

    def allgather(self, value):
        return ["/of/the/first/host", value]


@pytest.mark.parametrize("fails", [False, True])
def test_each_host_converts_for_itself_and_leaves_nothing(fails, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def convert(source, out, key):
        out.mkdir()
        if fails:
            raise UsageError(f"{key}: {source}")

    monkeypatch.setattr(trained, "convert_in_subprocess", convert)
    expected = pytest.raises(UsageError) if fails else contextlib.nullcontext()
    with expected, trained.run_folder("hf:/llama", Cluster()) as folder:
        assert folder.parent.parent == tmp_path and folder.is_dir()
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_none_is_one_sentence(tmp_path):
    job = run("evaluate", "--run", f"hf:{tmp_path}/none")
    assert job.returncode == 2
    assert job.stdout.startswith(f"error: hf:{tmp_path}/none: ") and job.stdout.count("\n") == 1
