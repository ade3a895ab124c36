"""The memory of a run does not grow with its steps. (A save leaks about 30 kB: DETAILS.md.)"""

import subprocess
import sys

import numpy as np
import pytest

from jobs import environment, records

# The model is so small that any growth comes from memory that steps leak.
TOY = (
    "model.n_layer=1 model.n_head=1 model.n_embd=16 model.block_size=8 train.batch_size=2 "
    "train.eval_interval=0 train.eval_iters=1 train.sample_tokens=0 train.log_interval=50 "
    "train.trackers= optimizer.warmup_iters=1 checkpoint.interval=0"
).split()
STEPS = 20_000
# With pages of 2 MiB, slow growth would show up as jumps.
PROGRAM = """
import ctypes
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE
from jaxgpt.train.__main__ import main
main()
"""


@pytest.mark.long
def test_resident_memory_grows_by_less_than_50_kilobytes_in_a_thousand_steps(tmp_path):
    arguments = ("--config", "tiny", "--mesh", "1,1,1", *TOY, f"train.max_iters={STEPS}")
    job = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments, "--out", tmp_path],
        env=environment(MALLOC_ARENA_MAX="1"),  # stops `keep_freed_memory` from using large pages
        stdout=subprocess.DEVNULL,
        timeout=1800,
    )
    assert job.returncode == 0
    found = [(r["step"], r["memory_bytes"]) for r in records(tmp_path)]
    steps, memory = np.array([f for f in found if STEPS // 4 < f[0] < STEPS], np.float64).T
    slope = 1000 * np.polyfit(steps, memory, 1)[0]
    print(
        f"largest jump {np.diff(memory).max() / 1e6:.2f} MB, {slope / 1e3:.1f} kB per 1,000 steps"
    )
    assert slope < 50_000
