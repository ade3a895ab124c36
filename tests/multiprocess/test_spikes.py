"""In real mpiexec jobs, all processes react to the same spike in the same way."""

from pathlib import Path

import numpy as np
import pytest

from jobs import FIVE_AXES, SMALL, checkpoint_arrays, losses, records, run

HERE = Path(__file__).parent
ARGUMENTS = (
    *SMALL, "--mesh", "2,1,2", "model.n_layer=1", "model.n_embd=32", "optimizer.warmup_iters=2",
    "optimizer.learning_rate=0.01", "train.max_iters=50", "checkpoint.interval=10",
    "checkpoint.keep=10", "spike.window=16", "spike.action=rewind", "spike.rewind_margin=10",
    "spike.skip_before=2", "spike.skip_after=6", "--faults.random_tokens", "36", "38",
)  # fmt: skip
NAN = ("faults.nan_step=12", "faults.nan_device=3")


@pytest.mark.parametrize("mesh", [(), pytest.param(FIVE_AXES, marks=pytest.mark.long)])
def test_all_processes_rewind_together_and_finish_what_was_interrupted(mesh, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    arguments = (*ARGUMENTS, *mesh, *NAN)
    job = run("train", *arguments, "--out", whole, processes=2)
    assert job.returncode == 0, job.stdout
    assert job.stdout.count("rewound to step 20 because of the spike at step 36") == 1
    assert [r["step"] for r in records(whole)] == list(range(1, 51))
    assert (12, "nonfinite") in [(r["step"], r["cause"]) for r in records(whole, "spike")]
    norms = {r["step"]: r["grad_norm"] for r in records(whole)}
    assert [s for s, norm in norms.items() if norm is None] == [12, *range(34, 43)]

    job = run(HERE / "faulty.py", "rewind", 0, *arguments, "--out", parts, processes=2)
    assert job.returncode == 1 and "planted in rewind" in job.stdout, job.stdout
    assert max(losses(parts)) == 36  # dropped only when the run is started again
    job = run("train", *arguments, "--out", parts, processes=2)
    assert job.returncode == 0, job.stdout
    assert "resumed from step 20" in job.stdout
    assert losses(parts) == losses(whole)
    a, b = checkpoint_arrays(parts, 50), checkpoint_arrays(whole, 50)
    assert all((a[name] == b[name]).all() for name in b) and a.keys() == b.keys()


@pytest.mark.long
def test_all_processes_stop_with_a_good_checkpoint_after_too_many_nans(tmp_path):
    more = ("faults.nan_step=13", "spike.max_consecutive_nonfinite=1")
    job = run("train", *ARGUMENTS, *more, "--out", tmp_path, processes=2)
    assert job.returncode == 1, job.stdout
    assert (
        job.stdout.count(
            "error: spike.max_consecutive_nonfinite=1: the loss or gradient was not finite"
        )
        == 1
    )
    assert "Traceback" not in job.stdout
    arrays = checkpoint_arrays(tmp_path, 13)
    assert all(np.isfinite(array).all() for array in arrays.values())
