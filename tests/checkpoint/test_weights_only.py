"""Parameters that are written in parts can be restored like any other checkpoint."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxgpt.checkpoint import weights_only
from jaxgpt.checkpoint.checkpointer import restore_params
from jaxgpt.checkpoint.checksums import checksums, part_checksum
from jaxgpt.checkpoint.metadata import read_meta
from jaxgpt.checkpoint.weights_only import WeightsReader, WeightsWriter, chunk_shape
from jaxgpt.config import Config, ModelConfig, UsageError, mesh_shape
from jaxgpt.models.weights import weights
from jaxgpt.parallel.mesh import make_mesh
from jaxgpt.train.state import state_shapes
from jobs import flat

MODEL = ModelConfig(
    n_layer=3, n_head=4, n_kv_head=2, n_embd=32, block_size=16, vocab_size=150, mlp="swiglu",
    mlp_hidden=48, tie_embeddings=False, qk_norm=True,
)  # fmt: skip
ODD = "run #1?%41"  # a folder whose name would have to be quoted in a URL


def random_params():
    draw = np.random.default_rng(0).normal
    return jax.tree.map(lambda w: draw(size=w.shape).astype(np.float32), weights(MODEL))


def write(folder, params):
    """Write the layers in reverse order, and other weights in halves of their rows."""
    writer = WeightsWriter(folder, MODEL)
    for weight, array in zip(jax.tree.leaves(weights(MODEL)), jax.tree.leaves(params), strict=True):
        if not weight.n_layers:
            half = (len(array) + 1) // 2
            for rows in (slice(half, len(array)), slice(0, half)):
                writer.write(weight.name, (rows,), array[rows])
        for layer in reversed(range(weight.n_layers)):
            if "gate_up" in weight.name:
                for part in (1, 0):
                    index = (layer, slice(None), part)
                    writer.write(weight.name, index, array[index])
            else:
                writer.write(weight.name, (np.int64(layer),), array[layer])
    writer.close(Config(model=MODEL), None, "a test")


@pytest.mark.parametrize("mesh", ["1,1,1", "2,2,2", "1,8,1"])
def test_any_mesh_reads_what_was_written_in_parts(mesh, tmp_path, monkeypatch):
    monkeypatch.setattr(weights_only, "CHUNK_BYTES", 1000)
    params, folder = random_params(), tmp_path / ODD
    write(folder, params)
    config = Config(model=MODEL).replace(parallel__mesh=mesh)
    sizes = mesh_shape(config)
    devices = np.array(jax.devices()[: sizes.n_devices])
    mesh = make_mesh(sizes) if sizes.n_devices == 8 else jax.sharding.Mesh(
        devices.reshape(list(sizes.values())), tuple(sizes)
    )  # fmt: skip
    found = restore_params(folder, 0, state_shapes(config, mesh).params)
    expected = flat(params)
    for path, array in flat(found).items():
        np.testing.assert_array_equal(array, expected[path])


def test_layers_and_rows_are_read_a_few_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(weights_only, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(weights_only, "CHUNK_BYTES", 1000)
    params, folder = random_params(), tmp_path / ODD
    write(folder, params)
    reader = WeightsReader(folder, 0)
    for weight, array in zip(jax.tree.leaves(weights(MODEL)), jax.tree.leaves(params), strict=True):
        found = dict(reader.blocks(weight))
        if weight.n_layers:
            assert list(found) == [0, 1, 2]
            np.testing.assert_array_equal(np.stack(list(found.values())), array)
        else:
            np.testing.assert_array_equal(np.concatenate(list(found.values())), array)
    assert len(found) > 1  # blocks of rows of the last weight, the token embedding


def test_a_changed_byte_is_seen(tmp_path):
    params = random_params()
    write(tmp_path, params)
    name = "layers/mlp/gate_up/kernel"
    start = params["layers"]["mlp"]["gate_up"]["kernel"][1, :, 1].tobytes()
    state = tmp_path / "checkpoints" / "0" / "state"
    (path,) = (p for p in state.rglob("*") if p.is_file() and start in p.read_bytes())
    data = bytearray(path.read_bytes())
    data[data.index(start) + 9] ^= 1
    path.write_bytes(data)
    by_name = {w.name: w for w in jax.tree.leaves(weights(MODEL))}
    reader = WeightsReader(tmp_path, 0)
    with pytest.raises(UsageError, match=f"params/{name} does not match its checksum; choose"):
        list(reader.blocks(by_name[name]))
    list(reader.blocks(by_name["norm/scale"]))


def test_an_array_of_another_shape_or_none_is_refused(tmp_path):
    write(tmp_path, random_params())
    larger = ModelConfig(**vars(MODEL) | {"block_size": 32})
    (weight,) = (w for w in jax.tree.leaves(weights(larger)) if "position" in w.name)
    with pytest.raises(UsageError, match=r"has shape \(16, 32\), not \(32, 32\)"):
        list(WeightsReader(tmp_path, 0).blocks(weight))
    (bias,) = (
        w for w in jax.tree.leaves(weights(ModelConfig(**vars(MODEL) | {"bias": True})))
        if w.name == "norm/bias"
    )  # fmt: skip
    with pytest.raises(UsageError, match="cannot be read"):
        list(WeightsReader(tmp_path, 0).blocks(bias))


@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 3, 4, 5), (600, 700), (1, 1)])
def test_checksums_of_parts_add_up_to_that_of_the_whole(shape):
    array = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    mesh = jax.make_mesh((1,), ("x",))
    whole = jax.device_put(array, NamedSharding(mesh, PartitionSpec()))
    expected = checksums({"a": whole})["a"]
    zeros = [0] * len(shape)
    assert part_checksum(array, zeros, shape) == expected
    cut = shape[-1] // 2
    parts = part_checksum(array[..., :cut], zeros, shape) + part_checksum(
        array[..., cut:], [*zeros[:-1], cut], shape
    )
    assert parts % 2**32 == expected


def test_chunks_are_small_and_divide_what_is_written():
    for part in ((1, 4096, 1, 14336), (4096, 4096), (1, 4096), (3200, 5120), (1, 32, 128, 4096)):
        chunk = chunk_shape(part)
        assert all(n % c == 0 for n, c in zip(part, chunk, strict=True))
        assert 4 * np.prod(chunk) <= 2**25
        assert chunk == part or 4 * np.prod(chunk) > 2**23


def test_it_says_that_it_has_weights_only(tmp_path):
    write(tmp_path, random_params())
    meta = read_meta(tmp_path, 0)
    assert meta["weights_only"] and meta["source"] == "a test" and meta["step"] == 0
