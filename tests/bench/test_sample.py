import json
import math

import pytest

from jobs import run

SMALL = ("--config", "tiny", "model.n_layer=2", "model.n_head=2", "model.n_embd=32")


def test_a_text_with_the_cache_is_the_one_without_it():
    job = run("bench", "sample", *SMALL, "model.block_size=90", "--tokens", 74, "--json")
    assert job.returncode == 0, job.stdout
    found = json.loads(job.stdout)
    assert found["tokens"] == found["same_tokens"] == 74 >= found["distinct_tokens"] > 10
    for name in ("first_token_seconds", "cached_seconds", "recomputed_seconds"):
        assert 0 < found[name] < math.inf
    assert found["ratio"] == pytest.approx(found["recomputed_seconds"] / found["cached_seconds"])


def test_what_cannot_be_written_is_said():
    job = run("bench", "sample", *SMALL, "model.block_size=90", "--tokens", 75)
    assert job.returncode == 2 and job.stdout.count("\n") == 1
    assert "--tokens=75: with a prompt of 16 they must fit into model.block_size=90" in job.stdout
