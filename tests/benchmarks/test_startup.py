"""`bench startup`: the second start finds what the first has compiled."""

import json

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


def test_what_is_wrong_is_said_before_anything_starts():
    job = run("bench", "startup", "model.n_head=3")
    assert job.returncode == 2
    assert "model.n_head=3" in job.stdout and job.stdout.count("\n") == 1
