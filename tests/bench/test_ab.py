import json

import pytest

from jaxgpt.bench.ab import parse_change
from jaxgpt.config import UsageError
from jobs import run

TINY = (
    "--config", "tiny", "model.n_layer=1", "model.n_embd=32", "model.n_head=2",
    "model.block_size=32", "train.batch_size=4", "--steps", "1", "--rounds", "2",
)  # fmt: skip
MLP = "model.mlp=gelu_tanh xla_cpu_enable_fast_math=false jax_optimization_level=O1"


def test_steps_take_turns_with_and_without_each_change(tmp_path):
    remat, mask, cache = (
        "parallel.remat=full",
        "data.document_mask=True",
        f"compile_cache={tmp_path}",
    )
    words = [word for change in (remat, MLP, mask) for word in ("--change", change)]
    job = run("bench", "ab", *TINY, cache, *words, "--json")
    assert job.returncode == 0, job.stdout
    found = json.loads(job.stdout.splitlines()[-1])
    assert set(found["ratio"]) == {remat, MLP, mask}
    assert all(
        0 < ratio["least"] <= ratio["median"] <= ratio["most"] for ratio in found["ratio"].values()
    )
    assert set(found["seconds_per_step"]) == {"unchanged", remat, MLP, mask}
    moved = found["bytes_moved"]
    assert moved[remat] > moved["unchanged"] > 0  # the layer is computed again
    assert list(tmp_path.rglob("*train_step*"))  # compiled programs for the next run


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("xla_gpu_autotune_level", "xla_gpu_autotune_level has no value"),
        ("xla_nope=1", "--change=xla_nope=1: INVALID_ARGUMENT: No such compile option"),
        (
            "jax_num_cpu_devices=3",
            "jax_num_cpu_devices=3: jax_num_cpu_devices config should be updated",
        ),
        ("model.n_head=3", "model.n_embd=32: must be a multiple of model.n_head=3"),
        ("parallel.mesh=2,1,1 parallel.remat=full", "changes the mesh, the data or the vocabulary"),
        (
            "data.dataset=wordplay parallel.remat=full",
            "changes the mesh, the data or the vocabulary",
        ),
        ("model.vocab_size=300", "changes the mesh, the data or the vocabulary"),
        ("optimizer.learning_rate=1e-4", "does not change the compiled step"),
        ("train.batch_size=8", "changes the shapes or shardings of the state or the batch"),
    ],
)
def test_a_change_that_cannot_be_compared_is_an_error(change, words):
    job = run("bench", "ab", *TINY, "--change", change)
    assert job.returncode == 2
    assert words in job.stdout and "Traceback" not in job.stdout


@pytest.mark.parametrize("value", ["[", "!!int", "!!bool", "!!timestamp", "[" * 3000])
def test_a_malformed_value_of_a_jax_option_is_an_error(value):
    with pytest.raises(UsageError, match="jax_optimization_level has a malformed value"):
        parse_change(f"jax_optimization_level={value}", ["--config", "tiny"])
