"""A folder of transformers is evaluated as the run that it came from."""

import json

import pytest

from jaxgpt.convert.__main__ import main as convert
from jobs import SMALL, run, train_here

LLAMA = ("model.norm=rmsnorm", "model.position=rope", "model.mlp=swiglu", "model.n_kv_head=2")


@pytest.mark.long
def test_a_folder_of_transformers_has_the_loss_of_its_run(tmp_path):
    out, folder = tmp_path / "run", tmp_path / "hf"
    assert train_here(*SMALL, *LLAMA, "train.max_iters=5", "--out", out, "--mesh", "1,1,1") == 0
    convert(["to-hf", "--run", str(out), "--out", str(folder)])
    found = {}
    for where in (out, f"hf:{folder}"):
        job = run("evaluate", "--run", where, "data.dataset=python", "--json", "--mesh", "1,1,1")
        assert job.returncode == 0, job.stdout
        record = json.loads(job.stdout.splitlines()[-1])
        found[record["run"]] = record["loss"], record["tokens"]
    assert found.keys() == {str(out), f"hf:{folder}"} and len(set(found.values())) == 1


def test_a_folder_that_is_none_is_one_sentence(tmp_path):
    job = run("evaluate", "--run", f"hf:{tmp_path}/none")
    assert job.returncode == 2
    assert job.stdout.startswith(f"error: hf:{tmp_path}/none: ") and job.stdout.count("\n") == 1
