import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxgpt.config import MeshShape, UsageError, load_config
from jaxgpt.data.dataset import open_dataset
from jaxgpt.data.loader import Loader
from jaxgpt.parallel.mesh import make_mesh
from jaxgpt.parallel.sharding import batch_sharding


@pytest.fixture
def dataset():
    config = load_config("tiny")
    return open_dataset(config.data, config.model)


def loader(dataset, sharding, seed=1, kind=Loader):
    words = ("model.block_size=64", "train.batch_size=16", f"train.seed={seed}")
    return kind.for_training(dataset, load_config("tiny", *words), sharding)


def test_rows_are_the_tokens_of_the_file_at_their_offsets(dataset):
    file = np.fromfile(dataset.sources[0].entry.directory / "train.bin", np.uint16)
    made = loader(dataset, batch_sharding(make_mesh(MeshShape(8))))
    for row, tokens in enumerate(np.asarray(made.batch(7))):
        offset = made.row_location(7, row).offset
        assert (tokens == file[offset : offset + 65]).all()


@pytest.mark.parametrize("mesh", [(8, 1, 1), (1, 8, 1), (2, 1, 4), (1, 1, 8)])
def test_the_batch_does_not_depend_on_the_mesh(dataset, mesh):
    whole = NamedSharding(make_mesh(MeshShape(8)), PartitionSpec())
    expected = np.asarray(loader(dataset, whole).batch(3))
    batch = loader(dataset, batch_sharding(make_mesh(MeshShape(*mesh)))).batch(3)
    assert (np.asarray(batch) == expected).all()
    rows = 16 // (mesh[0] * mesh[1])
    assert {s.data.shape for s in batch.addressable_shards} == {(rows, 65)}


def test_reading_ahead_changes_nothing(dataset):
    made = loader(dataset, batch_sharding(make_mesh(MeshShape(8))))
    steps = [5, 6, 40, 41]
    for step, batch in zip(steps, made.batches(steps), strict=True):
        assert (np.asarray(batch) == np.asarray(made.batch(step))).all()


def test_only_the_rows_that_are_needed_are_read(dataset):
    reads = []

    class Counting(Loader):
        def read(self, step, rows):
            reads.append(rows)
            return super().read(step, rows)

    made = loader(dataset, batch_sharding(make_mesh(MeshShape(2, 1, 4))), kind=Counting)
    made.batch(1)
    assert reads == [range(0, 8), range(8, 16)]  # once each, though four devices hold them


def test_a_bad_token_is_named_with_file_and_offset(dataset):
    small = type(dataset)(dataset.sources, 100, None)
    made = loader(small, batch_sharding(make_mesh(MeshShape(8))))
    with pytest.raises(UsageError, match=r"model.vocab_size=100: .*train.bin holds token \d+ at"):
        made.batch(1)


def test_the_seed_is_part_of_the_order(dataset):
    sharding = batch_sharding(make_mesh(MeshShape(8)))
    one, two = (np.asarray(loader(dataset, sharding, seed).batch(1)) for seed in (1, 2))
    assert (one != two).any()


def test_evaluation_has_an_order_of_its_own(dataset):
    config = load_config("tiny", "model.block_size=64", "train.batch_size=16")
    sharding = batch_sharding(make_mesh(MeshShape(8)))
    trained = Loader.for_training(dataset, config, sharding)
    evaluated = Loader.for_evaluation(dataset, "train", config, sharding)
    first = {trained.row_location(1, row).offset for row in range(16)}
    assert len(first.intersection(evaluated.row_location(1, row).offset for row in range(16))) < 8
