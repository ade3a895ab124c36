"""`bench startup`: the warm start finds what the cold start compiled."""

import json
import math
import signal
import tempfile
from pathlib import Path

import pytest

from jaxgpt.bench import startup
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


def test_at_most_one_run_directory_exists_at_a_time(tmp_path, monkeypatch):
    """Each run saves a checkpoint, which may be large."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    phase = {"max": 1.0}

    def start(command, **variables):
        if "--out" in command:
            assert not list(tmp_path.glob("jaxgpt-bench-*/*/startup.json"))
            out = Path(command[-1])
            out.mkdir()
            report = {"total": phase, "phases": {"imports": phase}, "compile_cache": "miss"}
            (out / "startup.json").write_text(json.dumps(report))
        return 1.0

    monkeypatch.setattr(startup, "_run_command", start)
    try:
        found = startup.run([], runs=2)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert found["warm_per_imports"].value == 1.0


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
def test_bad_input_is_an_error_before_anything_starts(setting, words):
    job = run("bench", "startup", *setting)
    assert job.returncode == 2
    assert words in job.stdout and job.stdout.count("\n") == 1
