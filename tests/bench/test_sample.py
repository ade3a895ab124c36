import json
import math

import pytest

from jobs import run

SMALL = ("--config", "tiny", "model.n_layer=2", "model.n_head=2", "model.n_embd=32")


def test_the_first_and_the_following_tokens_are_timed():
    job = run("bench", "sample", *SMALL, "model.block_size=90", "--tokens", 74, "--json")
    assert job.returncode == 0, job.stdout
    found = json.loads(job.stdout)
    assert found["tokens"] == 74
    assert 0 < found["first_token_seconds"] < found["seconds"] < math.inf
    assert found["seconds_per_token"] == pytest.approx(found["seconds"] / 74)


def test_text_that_does_not_fit_is_an_error():
    job = run("bench", "sample", *SMALL, "model.block_size=90", "--tokens", 75)
    assert job.returncode == 2 and job.stdout.count("\n") == 1
    assert (
        "--tokens=75: with a prompt of 16 tokens, the text does not fit into "
        "model.block_size=90; set that to at least 91"
    ) in job.stdout
