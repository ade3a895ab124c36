"""Several processes write the same dataset as one process."""

import json
import random
from pathlib import Path

import pytest

from jobs import run

SMALL_PARTS = Path(__file__).with_name("small_parts.py")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    home, draw = tmp_path_factory.mktemp("corpus"), random.Random(0)
    for n in range(9):
        texts = [f"{n} " + "fjord æ " * draw.randrange(90) for _ in range(300)]
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (home / f"{n}.jsonl").write_text(lines)
        (home / f"{n}.txt").write_text("\n\n".join(texts))
    return home


def prepared(out, *given, processes=None):
    job = run(SMALL_PARTS, "text", "--out", out, "--input", *given, processes=processes)
    assert job.returncode == 0, job.stdout
    files = {path.name: path.read_bytes() for path in out.iterdir()}
    said = job.stdout[job.stdout.index("vocab size") :]  # without a progress bar
    return said.replace(str(out), "OUT"), files


@pytest.mark.parametrize(
    "options",
    [
        ("--tokenizer", "byte"),
        pytest.param(("--format", "megatron", "--tokenizer", "byte"), marks=pytest.mark.long),
    ],
    ids=" ".join,
)
def test_files_do_not_depend_on_the_processes(options, corpus, tmp_path):
    alone = prepared(tmp_path / "1" / "d", corpus, *options)
    assert prepared(tmp_path / "2" / "d", corpus, *options, processes=3) == alone


def test_characters_and_the_cut_of_text_do_not_depend_on_the_processes(corpus, tmp_path):
    texts = sorted(corpus.glob("*.txt"))
    alone = prepared(tmp_path / "1", *texts)
    assert prepared(tmp_path / "2", *texts, processes=2) == alone


def test_a_mistake_in_a_file_is_said_once_and_ends_the_job(corpus, tmp_path):
    (tmp_path / "bad.jsonl").write_text("{text}")
    given = ["--input", tmp_path / "bad.jsonl", corpus, "--out", tmp_path / "d"]
    job = run(SMALL_PARTS, "text", *given, "--tokenizer", "byte", processes=2)
    assert job.returncode == 2 and "Traceback" not in job.stdout
    assert job.stdout.count("bad.jsonl: line 1 must be a JSON object") == 1
    job = run(SMALL_PARTS, "text", "--input", tmp_path / "no.txt", processes=2)
    assert job.returncode == 2 and job.stdout.count("error:") == 1
