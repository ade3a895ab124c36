import json
import math
import subprocess

import pytest

from jobs import command, environment, run


def test_the_loader_is_compared_with_a_memory_map():
    job = run(
        "bench", "loader", "--config", "tiny", "--batches", 2, "--json",
        "model.block_size=64",
    )  # fmt: skip
    assert job.returncode == 0, job.stdout
    found = json.loads(job.stdout)
    assert found["batch_size"] == 24 and found["block_size"] == 64
    assert found["data_bytes"] > 2**20 and found["config"] == "tiny"
    for rate in ("tokens_per_sec", "memory_map_tokens_per_sec"):
        assert 0 < found[rate]["least"] <= found[rate]["median"] <= found[rate]["most"] < math.inf
    assert 0 < found["ratio"] < math.inf


@pytest.mark.parametrize("words", ["bench loader", "inspect --config tiny --step 1"])
def test_data_missing_on_one_host_ends_all_processes_with_an_error(words, tmp_path):
    program = command(*words.split())
    elsewhere = ["-n", "1", "env", f"JAXGPT_DATA={tmp_path}", *program]
    job = subprocess.run(
        ["mpiexec", "-n", "1", *program, ":", *elsewhere],
        capture_output=True, text=True, env=environment(), timeout=60,
    )  # fmt: skip
    assert job.returncode == 2
    errors = [line for line in job.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1 and f"there is no token data at {tmp_path}/python;" in errors[0]
