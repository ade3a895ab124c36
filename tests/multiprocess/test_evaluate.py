"""An evaluation by several processes prints once, with the same result as a single process."""

import json

import pytest

from evaluation import TEXT, evaluated, train
from jaxgpt.data.prepare.own_text import prepare_text
from jobs import run


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluate")
    (folder / "a.txt").write_text(TEXT)
    prepare_text(folder / "data", [folder / "a.txt"], "byte")
    return train(folder / "run", f"data.path={folder}/data")


def test_all_processes_take_part_and_one_prints(trained):
    alone = evaluated("--run", trained, "--batch", 8)
    job = run("evaluate", "--run", trained, "--batch", 3, "--json", "--mesh", "2,1,2", processes=2)
    assert job.returncode == 0, job.stdout
    (line,) = [line for line in job.stdout.splitlines() if line.startswith("{")]
    found = json.loads(line)
    assert found["loss"] == pytest.approx(alone["loss"], abs=1e-6)
    assert found["tokens"] == alone["tokens"] and found["bytes"] == alone["bytes"]
    assert found["mesh"] == "2,1,2" and found["batch"] == 4


def test_a_file_is_tokenized_once_for_all_processes(trained, tmp_path):
    (tmp_path / "held.txt").write_text(TEXT[:3000])
    given = ("--run", trained, "--input", tmp_path / "held.txt")
    alone = evaluated(*given)
    job = run("evaluate", *given, "--json", "--mesh", "2,1,1", processes=2)
    assert job.returncode == 0, job.stdout
    (line,) = [line for line in job.stdout.splitlines() if line.startswith("{")]
    found = json.loads(line)
    assert found["loss"] == pytest.approx(alone["loss"], abs=1e-6)
    assert found["tokens"] == alone["tokens"] == len(TEXT[:3000].encode()) - 1


def test_bad_input_is_said_once(trained):
    job = run("evaluate", "--run", trained, "--dataset", "nope", "--mesh", "2,1,1", processes=2)
    assert job.returncode == 2
    assert job.stdout.count("error: data.dataset=nope") == 1 and "Traceback" not in job.stdout
