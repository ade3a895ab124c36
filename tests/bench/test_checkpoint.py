import json
import math

import pytest

from jobs import run

TINY = ("--config", "tiny", "model.n_layer=2")


@pytest.mark.long
def test_a_checkpoint_of_several_processes_is_compared_with_plain_files(tmp_path):
    job = run(
        "bench", "checkpoint", *TINY, "--mesh", "1,2,1", "--out", tmp_path, "--json", processes=2
    )
    assert job.returncode == 0, job.stdout
    found = json.loads(job.stdout)  # only process 0 prints
    assert found["processes"] == 2 and found["mesh"]["fsdp"] == 2
    # A layer has 12 D^2 parameters and two moments in float32; tiny's D is 128.
    assert 0 < found["state_bytes"] - 2 * 3 * 4 * 12 * 128**2 < 2e6
    # The arrays are not compressed, and little else is stored.
    assert found["state_bytes"] < found["file_bytes"] < 1.1 * found["state_bytes"]
    assert found["files"] > 2
    for name in ("save_blocks_seconds", "save_seconds", "restore_seconds", "save_ratio",
                 "restore_ratio"):  # fmt: skip
        assert 0 < found[name] < math.inf
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--out", "/dev/null/x"], "--out=/dev/null/x: cannot be written"),
        (
            ["--config", "tiny", "model.n_layer=9999999", "parallel.scan_layers=True"],
            "a checkpoint takes 23,6",
        ),
    ],
)
def test_bad_input_is_a_one_line_error(arguments, words):
    job = run("bench", "checkpoint", *arguments)
    assert job.returncode == 2
    assert words in job.stdout and job.stdout.count("\n") == 1
