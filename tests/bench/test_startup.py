"""`bench startup`: the warm start finds what the cold start compiled."""

import json
import math

import pytest

from jobs import SMALL, run


@pytest.mark.long
def test_a_warm_start_compiles_nothing(tmp_path):
    inside = {"JAXGPT_JOB_START": "1000000000"}  # of a job that is not timed
    job = run("bench", "startup", "--runs", 1, "--json", *SMALL, TMPDIR=str(tmp_path), **inside)
    assert job.returncode == 0, job.stdout
    found = json.loads(job.stdout)
    cold, warm = found["cold"], found["warm"]
    assert (cold["compile_cache"], warm["compile_cache"]) == ("miss", "hit")
    for start in (cold, warm):
        # Phases start with the process: no launcher's wait is counted, and nothing is evaluated.
        assert set(start["phases"]) == {
            "imports", "distributed init", "prepare", "devices", "setup", "state", "compile",
                "first step",
        }  # fmt: skip
        assert all(0 <= seconds < math.inf for seconds in start["phases"].values())
    assert found["imports_seconds"] > 0 and found["warm_per_imports"] > 0
    assert not list(tmp_path.glob("jaxgpt*"))


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        (["model.n_head=3"], "model.n_head=3"),
        (
            ["--train-range-to-skip", 1, 9],
            "train_range_to_skip=1 9: skips step 1, which bench startup measures",
        ),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(setting, words):
    job = run("bench", "startup", *setting)
    assert job.returncode == 2
    assert words in job.stdout and job.stdout.count("\n") == 1
