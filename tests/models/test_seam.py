"""The MLP that the room's README adds."""

import numpy as np
import pytest

from jaxgpt.config import ModelConfig, UsageError
from jaxgpt.models import layers
from jaxgpt.models.weights import weights
from jobs import SMALL, checkpoint_arrays, records, train_here
from readme_code import load_block, train_and_move


@pytest.fixture
def relu2(monkeypatch, tmp_path):
    module = load_block("jaxgpt/models/README.md", "relu2", tmp_path)
    monkeypatch.setitem(layers.MLPS, "relu2", module.relu2)
    weights.cache_clear()
    yield module
    weights.cache_clear()


def test_its_activation_is_the_square_of_what_is_positive(relu2):
    x = np.array([-2.0, 0.0, 0.5, 3.0], np.float32)
    np.testing.assert_array_equal(relu2.squared_relu(x), [0.0, 0.0, 0.25, 9.0])


def test_it_trains_saves_and_moves_to_another_mesh(relu2, tmp_path):
    gelu = train_and_move(train_here, records, tmp_path / "gelu", *SMALL)
    losses = train_and_move(train_here, records, tmp_path / "relu2", *SMALL, "model.mlp=relu2")
    assert sorted(losses) == [1, 2, 3, 4, 5, 6] and losses[6] < losses[1]
    assert losses[1] != gelu[1]
    saved = checkpoint_arrays(tmp_path / "relu2", 6)
    assert any("['mlp']['up']['kernel']" in path for path in saved)


def test_an_unknown_mlp_is_one_sentence():
    with pytest.raises(UsageError, match="model.mlp=swish: must be one of .*gelu"):
        weights(ModelConfig(vocab_size=65, mlp="swish"))
