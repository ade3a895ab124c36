import json
import math

import pytest

from jobs import run


@pytest.mark.long  # the short tests time steps in tests/peers/test_peers.py
def test_steps_are_timed_and_profiled_even_without_data(tmp_path):
    L, D, T, V, B = 2, 32, 64, 64, 8
    job = run(
        "bench", "step", "--config", "gpt2", "--mesh", "2,1,1", f"model.n_layer={L}",
        f"model.n_embd={D}", "model.n_head=2", f"model.block_size={T}", f"model.vocab_size={V}",
        f"train.batch_size={B}", "train.gradient_accumulation_steps=1", "train.dtype=float32",
        "--steps", 3, "train.max_iters=8", "--profile", tmp_path, "--json", processes=2,
    )  # fmt: skip
    assert job.returncode == 0, job.stdout
    found = json.loads(job.stdout)  # only process 0 prints
    assert found["processes"] == found["devices"] == 2 and found["steps_per_round"] == 3
    assert "random tokens, because there is no" in found["data"]

    times = found["seconds_per_step"]
    assert set(times) == {"median", "least", "most"}
    assert found["tokens_per_sec"] == pytest.approx(B * T / times["median"])
    # Kaplan et al., arXiv 2001.08361, table 1, with D_ff = 4 D; the embedding is tied. PaLM's
    # FLOPs (arXiv 2204.02311, appendix B).
    n = 12 * L * D**2 + (2 * L + 1) * D + V * D
    assert found["flops_per_step"] == (6 * n + 12 * L * D * T) * B * T
    assert found["flops_per_sec_per_device"] == pytest.approx(
        found["flops_per_step"] / times["median"] / 2
    )
    assert found["mfu"] is None  # the peak of a CPU is unknown
    for value in (found["share_of_matmul"], found["compile_seconds"]):
        assert 0 < value < math.inf
    # Parameters and both moments in float32, including the position embeddings.
    assert found["device_compiled_bytes"] > 3 * 4 * (n + T * D)
    assert found["peak_bytes"] > 2**27  # JAX alone takes more

    assert {op["category"] for op in found["profile"]["operations"]} & {"matmul", "collective"}
    assert len(list(tmp_path.glob("plugins/profile/*/*.xplane.pb"))) == 1  # process 0's


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--steps", "0"], "--steps: 0: must be a whole number, at least 1"),
        (["--profile", "/dev/null/x"], "--profile=/dev/null/x: cannot be written"),
        (["model.n_head=3"], "model.n_embd=128: must be a multiple of model.n_head=3"),
    ],
)
def test_bad_input_is_a_one_line_error(arguments, words):
    job = run("bench", "step", *arguments)
    assert job.returncode == 2
    assert words in job.stdout and job.stdout.count("\n") == 1


@pytest.mark.long
def test_non_finite_steps_end_bench_step_with_an_error():
    fault = ("faults.nan_step=4", "spike.max_consecutive_nonfinite=1", "model.n_layer=1")
    job = run("bench", "step", "--steps", 2, *fault)
    assert job.returncode == 2
    (error,) = (line for line in job.stdout.splitlines() if line.startswith("error: "))
    assert (
        "spike.max_consecutive_nonfinite=1: the loss or gradient was not finite in 1 consecutive "
        "step, up to step 4;" in error
    )
