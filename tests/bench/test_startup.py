"""`bench startup`: the second start finds what the first has compiled."""

import json

import pytest

from jobs import SMALL, run


def test_a_warm_start_compiles_nothing_and_is_faster(tmp_path):
    inside = {"JAXGPT_JOB_START": "1000000000"}  # of another job than those that are timed
    job = run("bench", "startup", "--runs", 1, "--json", *SMALL, TMPDIR=str(tmp_path), **inside)
    assert job.returncode == 0, job.stdout
    found = json.loads(job.stdout)
    cold, warm = found["cold"], found["warm"]
    assert (cold["compile_cache"], warm["compile_cache"]) == ("miss", "hit")
    assert warm["phases"]["compile"] < cold["phases"]["compile"]
    for start in (cold, warm):
        # The phases follow one another from the start of the process to the end of its step.
        assert abs(sum(start["phases"].values()) - start["seconds"]) < 0.1
    assert found["imports_seconds"] > 0
    assert not list(tmp_path.glob("jaxgpt*"))


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        (["model.n_head=3"], "model.n_head=3"),
        (
            ["--train-range-to-skip", 1, 9],
            "train_range_to_skip=1 9: bench startup waits for step 1, which is skipped; leave",
        ),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(setting, words):
    job = run("bench", "startup", *setting)
    assert job.returncode == 2
    assert words in job.stdout and job.stdout.count("\n") == 1
