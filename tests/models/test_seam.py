"""The MLP that the folder's README adds."""

import pytest
from flax import nnx

from jaxgpt.config import ModelConfig, UsageError
from jaxgpt.models import mlp
from jaxgpt.models.layers import LayerBuilder
from jaxgpt.models.weights import weights
from jaxgpt.parallel.tensor import ParallelContext
from jobs import SMALL, checkpoint_arrays, records, train_here
from readme_code import load_block, train_and_move


@pytest.fixture
def geglu(monkeypatch, tmp_path):
    module = load_block("jaxgpt/models/README.md", "geglu", tmp_path)
    monkeypatch.setitem(mlp.MLPS, "geglu", module.GEGLU)
    weights.cache_clear()
    yield module
    weights.cache_clear()


def test_it_trains_saves_and_moves_to_another_mesh(geglu, tmp_path):
    assert train_here(*SMALL, "train.max_iters=1", "--out", tmp_path / "gelu") == 0
    losses = train_and_move(train_here, records, tmp_path / "geglu", *SMALL, "model.mlp=geglu")
    assert sorted(losses) == [1, 2, 3, 4, 5, 6] and losses[6] < losses[1]
    assert losses[1] != records(tmp_path / "gelu")[0]["loss"]
    saved = checkpoint_arrays(tmp_path / "geglu", 6)
    assert any("['mlp']['gate']['kernel']" in path for path in saved)


def test_an_unknown_mlp_is_one_sentence():
    with pytest.raises(UsageError, match="model.mlp=swish: must be one of .*gelu"):
        weights(ModelConfig(vocab_size=65, mlp="swish"))


def test_a_layer_whose_inputs_tensor_does_not_divide_is_refused():
    config = ModelConfig(vocab_size=65, n_embd=8)
    build = LayerBuilder(config, "float32", ParallelContext(tensor=4), nnx.Rngs(0))
    with pytest.raises(UsageError, match=r"tensor=4 does not divide the 6 inputs \(mlp\)"):
        build.row_parallel((6,), (8,), ("mlp", "embed"))


def test_a_weight_needs_a_partition_rule(monkeypatch):
    """A weight with an unknown logical axis would be replicated, and its products added up."""

    class Misnamed(mlp.MLP):
        def __init__(self, build):
            super().__init__(mlp.gelu, build)
            D, F = build.config.n_embd, build.config.mlp_width
            self.up = build.column_parallel((D,), (F,), ("embed", "ffn"))

    monkeypatch.setitem(mlp.MLPS, "misnamed", Misnamed)
    with pytest.raises(UsageError, match="layers/mlp/up/kernel: has the logical axis 'ffn'"):
        weights(ModelConfig(vocab_size=256, mlp="misnamed"))
