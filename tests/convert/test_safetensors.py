"""Safetensors folders, compared with what Hugging Face's package reads and writes."""

import json

import ml_dtypes
import numpy as np
import pytest

from jaxgpt.config import UsageError
from jaxgpt.convert import safetensors
from jaxgpt.convert.safetensors import INDEX, WEIGHTS_FILE, open_file, open_folder, write_folder

package = pytest.importorskip("safetensors.numpy")
TENSORS = {
    name: np.random.default_rng(0).normal(size=shape).astype(np.float32)
    for name, shape in {
        "b.x": (3, 5),
        "a": (7,),
        "c.é": (2, 3, 4),
        "no": (0, 3),
    }.items()
}


def write(folder, dtype="float32", tensors=TENSORS):
    shapes = {name: array.shape for name, array in tensors.items()}
    write_folder(folder, tensors.items(), shapes, dtype)


def test_the_package_reads_what_we_write(tmp_path):
    write(tmp_path)
    found = package.load_file(tmp_path / WEIGHTS_FILE)
    assert found.keys() == TENSORS.keys()
    for name, array in TENSORS.items():
        np.testing.assert_array_equal(found[name], array)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_we_read_what_the_package_writes(dtype, tmp_path):
    tensors = TENSORS | {"scalar": np.array(2.5)}
    given = {name: array.astype(dtype) for name, array in tensors.items()}
    package.save_file(given, tmp_path / WEIGHTS_FILE, metadata={"format": "pt"})
    found = open_folder(tmp_path)
    assert found.keys() == given.keys()
    for name, array in given.items():
        read = found[name].read()
        assert read.dtype == np.float32 and found[name].shape == array.shape
        np.testing.assert_array_equal(read, array.astype(np.float32))
    np.testing.assert_array_equal(found["b.x"].read(1, 3), given["b.x"][1:3].astype(np.float32))


def test_bfloat16_is_rounded_to_the_nearest(tmp_path):
    write(tmp_path, "bfloat16")
    for name, tensor in open_folder(tmp_path).items():
        expected = TENSORS[name].astype(ml_dtypes.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(tensor.read(), expected)


def test_a_tensor_may_come_in_parts(tmp_path):
    parts = [("a", np.ones((2, 3))), ("a", np.zeros((1, 3))), ("b", np.ones(4))]
    write_folder(tmp_path, parts, {"a": (3, 3), "b": (4,)}, "bfloat16")
    found = open_folder(tmp_path)
    assert found["a"].read().tolist() == [[1] * 3, [1] * 3, [0] * 3]
    assert found["b"].read().tolist() == [1] * 4


def test_large_models_are_written_in_shards(tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors, "SHARD_BYTES", 100)
    write(tmp_path)
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert files == [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(a.nbytes for a in TENSORS.values())
    for name, file in index["weight_map"].items():
        np.testing.assert_array_equal(package.load_file(tmp_path / file)[name], TENSORS[name])
    for name, tensor in open_folder(tmp_path).items():
        np.testing.assert_array_equal(tensor.read(), TENSORS[name])


def test_a_file_that_is_cut_is_refused(tmp_path):
    write(tmp_path)
    whole = (tmp_path / WEIGHTS_FILE).read_bytes()
    for n in range(0, len(whole), 3):
        (tmp_path / WEIGHTS_FILE).write_bytes(whole[:n])
        with pytest.raises(UsageError, match="is not a complete safetensors file") as raised:
            open_folder(tmp_path)
        assert "\n" not in str(raised.value)


def test_a_spoiled_file_is_read_or_refused(tmp_path):
    write(tmp_path)
    whole, draw = (tmp_path / WEIGHTS_FILE).read_bytes(), np.random.default_rng(1)
    for _ in range(300):
        changed = bytearray(whole)
        changed[draw.integers(len(whole))] = draw.integers(256)
        (tmp_path / WEIGHTS_FILE).write_bytes(changed)
        try:
            for tensor in open_file(tmp_path / WEIGHTS_FILE).values():
                tensor.read()
        except UsageError as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 12]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [10**18, 10**18], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [3], "data_offsets": [100, 112]},
        {"dtype": "F32", "shape": [3]},
        {"dtype": "F33", "shape": [3], "data_offsets": [0, 12]},
        [],
    ],
)
def test_a_header_that_makes_no_sense_is_refused(entry, tmp_path):
    header = json.dumps({"w": entry}).encode()
    (tmp_path / WEIGHTS_FILE).write_bytes(len(header).to_bytes(8, "little") + header + bytes(12))
    with pytest.raises(UsageError, match="is not a complete safetensors file"):
        open_folder(tmp_path)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("../x.safetensors", "lists '../x.safetensors', which is not a file in the same folder"),
        ("/etc/passwd", "lists '/etc/passwd'"),
        ("a/b.safetensors", "lists 'a/b.safetensors'"),
        ("..", "lists '..'"),
        ("other.safetensors", "lists other.safetensors, which is missing; copy that file too"),
    ],
)
def test_an_index_names_files_of_its_folder_only(name, words, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    package.save_file(TENSORS, tmp_path / "x.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(UsageError) as raised:
        open_folder(folder)
    assert words in str(raised.value)


def test_an_index_that_is_wrong_is_refused(tmp_path):
    package.save_file(TENSORS, tmp_path / "x.safetensors")
    for content, words in (
        ("[]", "cannot be read as a JSON object"),
        ("{", "cannot be read as a JSON object"),
        ('{"weight_map": []}', "has no weight_map"),
        ('{"weight_map": {"z": "x.safetensors"}}', f"x.safetensors: has no z, which {INDEX} lists"),
    ):
        (tmp_path / INDEX).write_text(content)
        with pytest.raises(UsageError, match=words):
            open_folder(tmp_path)


def test_other_folders_are_told_what_is_missing(tmp_path):
    with pytest.raises(UsageError, match="is not a folder"):
        open_folder(tmp_path / "none")
    with pytest.raises(UsageError, match=f"has neither {WEIGHTS_FILE} nor"):
        open_folder(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(UsageError, match="only pytorch_model.bin; save the model again"):
        open_folder(tmp_path)


def test_other_dtypes_are_named_when_they_are_read(tmp_path):
    package.save_file({"mask": np.ones(3, np.uint8)}, tmp_path / WEIGHTS_FILE)
    with pytest.raises(UsageError, match="mask has dtype U8; weights must be one of F32"):
        open_folder(tmp_path)["mask"].read()
