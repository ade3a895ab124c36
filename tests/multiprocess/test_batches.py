"""The batch of a step is the same for any number of processes and any mesh (mpiexec jobs)."""

import hashlib
import json
from pathlib import Path

import pytest

from blends import write_corpora
from jaxgpt.config import load_config
from jaxgpt.data.dataset import open_dataset
from jaxgpt.data.loader import Loader
from jobs import run

HERE = Path(__file__).parent
MESHES = ("2,1,4", "1,8,1", "8,1,1")
STEPS = 200


@pytest.fixture(scope="module")
def blend(tmp_path_factory):
    return (
        "tiny", "model.vocab_size=97", "model.block_size=64", "train.batch_size=16",
        "data.val_share=0.05", "--data.blend", *write_corpora(tmp_path_factory.mktemp("corpora")),
    )  # fmt: skip


@pytest.fixture(scope="module")
def expected(blend):
    """Return the hashes of the rows, computed one row at a time, without devices."""
    config = load_config(*blend)
    rows = Loader.for_training(open_dataset(config.data, config.model), config)
    digest = hashlib.sha256()
    for step in range(1, STEPS + 1):
        for tokens in rows.read(step, range(16)):
            digest.update(hashlib.sha256(tokens.tobytes()).hexdigest().encode())
    return digest.hexdigest()


@pytest.mark.parametrize(
    "processes",
    [8, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 2, 4))],
)
def test_all_processes_and_meshes_restarts_and_skips_give_the_same_batches(
    processes, blend, expected
):
    job = run(HERE / "batches.py", STEPS, *MESHES, "--", *blend, processes=processes)
    assert job.returncode == 0, job.stdout
    line = next(line for line in job.stdout.splitlines() if line.startswith("found "))
    assert json.loads(line.removeprefix("found ")) == dict.fromkeys(MESHES, expected)
