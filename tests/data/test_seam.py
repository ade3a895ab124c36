"""The data format that the folder's README adds."""

import numpy as np
import pytest

from jaxgpt import data
from jaxgpt.config import load_config
from jaxgpt.data.dataset import open_dataset
from jaxgpt.data.loader import Loader
from jobs import SMALL, records, train_here
from readme_code import load_block, train_and_move


@pytest.fixture
def corpus(monkeypatch, tmp_path):
    """The same tokens as a .npy file and as a single nanoGPT file."""
    module = load_block("jaxgpt/data/README.md", "npy", tmp_path)
    made = data.Format(module.is_npy, module.open_npy)
    monkeypatch.setitem(data.FORMATS, "npy", made)
    tokens = np.random.default_rng(0).integers(0, 256, 30_000).astype(np.uint16)
    tokens.tofile(tmp_path / "flat.bin")
    np.save(tmp_path / "array.npy", tokens)
    return tmp_path


def test_batches_and_fingerprint_are_those_of_nanogpts_file(corpus):
    found = []
    for path in ("array.npy", "flat.bin"):
        config = load_config("tiny", f"data.path={corpus / path}", "model.vocab_size=256")
        dataset = open_dataset(config.data, config.model)
        dataset.verify()
        reader = Loader.for_training(dataset, config)
        rows = range(config.train.batch_size)
        batches = np.stack([reader.read(step, rows) for step in (1, 2, 777, 10**9)])
        found.append((batches.tobytes(), dataset.fingerprints[0][1], dataset.size("val")))
    assert found[0] == found[1]


def test_it_trains_saves_and_moves_to_another_mesh(corpus):
    settings = (f"data.path={corpus / 'array.npy'}", "model.vocab_size=256")
    losses = train_and_move(train_here, records, corpus / "run", *SMALL, *settings)
    assert sorted(losses) == [1, 2, 3, 4, 5, 6]
