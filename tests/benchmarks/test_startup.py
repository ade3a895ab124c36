"""`bench startup`: the second start finds what the first has compiled."""

import json

import pytest

from jobs import SMALL, run


def test_a_warm_start_compiles_nothing_and_is_faster(tmp_path):
    job = run("bench", "startup", "--runs", 1, "--json", *SMALL, TMPDIR=str(tmp_path))
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
    ("arguments", "words"),
    [
        (["model.n_head=3"], "model.n_head=3"),
        (["--processes", 2], "--processes=2: there is no mpiexec in PATH"),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(arguments, words):
    job = run("bench", "startup", *arguments, PATH="/dev/null")
    assert job.returncode == 2
    assert words in job.stdout and job.stdout.count("\n") == 1
