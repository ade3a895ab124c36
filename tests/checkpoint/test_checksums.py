"""Checksums equal an independent implementation, and detect the changes that they should."""

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxgpt.checkpoint import checksums as module
from jaxgpt.checkpoint.checksums import checksums
from jaxgpt.config import MeshShape
from jaxgpt.parallel.mesh import make_mesh


def fmix32(h):
    """Return the hash of a Python integer, as in smhasher's MurmurHash3.cpp."""
    h ^= h >> 16
    h = h * 0x85EBCA6B % 2**32
    h ^= h >> 13
    h = h * 0xC2B2AE35 % 2**32
    return h ^ h >> 16


def expected(array):
    bits = array.view(f"uint{8 * array.itemsize}").ravel().tolist()
    return sum(fmix32((word + place) % 2**32) for place, word in enumerate(bits)) % 2**32


def test_the_mixing_is_that_of_murmurhash3():
    assert fmix32(0) == 0 and fmix32(1) == 0x514E28B7  # MurmurHash3_x86_32 of no bytes with seed 1


@pytest.mark.parametrize("mesh", [(8, 1, 1), (2, 2, 2), (1, 4, 2)], ids=str)
@pytest.mark.parametrize(
    ("shape", "dtype", "spec"),
    [
        ((3, 8, 14), np.float32, P(None, "fsdp", "tensor")),
        ((16, 8, 5), np.float32, P(("data", "fsdp"), "tensor")),
        ((16, 6), ml_dtypes.bfloat16, P(("tensor", "data"))),
        ((24,), np.float32, P(("data", "fsdp", "tensor"))),
        ((7,), np.float32, P()),
        ((), np.int32, P()),
    ],
    ids=str,
)
def test_an_array_has_the_same_checksum_however_it_is_shared_out(
    shape, dtype, spec, mesh, monkeypatch
):
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 16)
    array = np.asarray(np.random.default_rng(0).normal(size=shape) * 100).astype(dtype)
    placed = jax.device_put(array, NamedSharding(make_mesh(MeshShape(*mesh)), spec))
    assert checksums({"a": [placed]}) == {"a/0": expected(array)}


def test_a_flipped_bit_and_swapped_elements_are_found():
    sharding = NamedSharding(make_mesh(MeshShape(1, 8, 1)), P("fsdp"))
    array = np.random.default_rng(0).normal(size=64).astype(np.float32)
    right = checksums([jax.device_put(array, sharding)])
    for bit in range(32):
        other = array.copy()
        other.view(np.uint32)[bit] ^= np.uint32(1 << bit)
        assert checksums([jax.device_put(other, sharding)]) != right
    swapped = array[::-1].copy()
    assert checksums([jax.device_put(swapped, sharding)]) != right
