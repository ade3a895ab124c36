"""Files of torch.save: tensors and containers are read, and nothing is ever run."""

import argparse
import functools
import os
import pickle
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest

import torch_files
from jaxgpt.config import UsageError
from jaxgpt.convert.megatron import is_harmless
from jaxgpt.convert.tensors import FileTensor
from jaxgpt.convert.torch_file import Global, Inert, load


def arrays(value):
    """The same value with every tensor read."""
    if isinstance(value, FileTensor):
        return value.read()
    if isinstance(value, dict):
        return {key: arrays(item) for key, item in value.items()}
    return type(value)(map(arrays, value)) if isinstance(value, list | tuple) else value


def test_tensors_and_containers_are_what_was_saved(tmp_path):
    draw = np.random.default_rng(0).normal
    w = draw(size=(3, 4)).astype(np.float32)
    state = OrderedDict(
        a=w, b=draw(size=5).astype(np.float16), transposed=np.asfortranarray(w), empty=w[:0],
        scalar=np.array(2.5, np.float32),
    )  # fmt: skip
    given = {
        "model": state, "n": 7, "names": ["x", "y"], "pair": (1, None), "rate": 1e-3, "yes": True,
        "members": {1, 2}, "nested": {"deep": [{"w": w}]}, "large": 2**70, "long": "ab" * 200,
    }  # fmt: skip
    torch_files.save(tmp_path / "a.pt", given)
    found = load(tmp_path / "a.pt")
    assert [found["model"][k].shape for k in state] == [a.shape for a in state.values()]
    found = arrays(found)
    for name, array in state.items():
        np.testing.assert_array_equal(found["model"][name], array.astype(np.float32))
        assert found["model"][name].dtype == np.float32
    np.testing.assert_array_equal(found["nested"]["deep"][0]["w"], w)
    for key in given.keys() - {"model", "nested"}:
        assert found[key] == given[key], key


def test_rows_are_read_alone(tmp_path):
    w = np.arange(24, dtype=np.float32).reshape(6, 4)
    torch_files.save(tmp_path / "a.pt", [w, np.asfortranarray(w)])
    for tensor in load(tmp_path / "a.pt"):
        np.testing.assert_array_equal(tensor.read(2, 5), w[2:5])


class Runs:
    """What a pickle does when it is loaded as usual."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def programs(marker):
    """Pickles that make a file, or would with a little more."""
    touch = f"touch {marker}"
    code = f"open({str(marker)!r}, 'w')"
    yield "os.system", pickle.dumps({"model": Runs(os.system, touch)})
    yield "builtins.eval", pickle.dumps(Runs(eval, code), protocol=4)
    yield "builtins.exec", pickle.dumps([Runs(exec, code)], protocol=2)
    yield "functools.partial", pickle.dumps(Runs(functools.partial, os.system, touch))
    yield "builtins.getattr", pickle.dumps(Runs(getattr, "x", "upper"))
    yield "pathlib.Path.touch", pickle.dumps(Runs(Path.touch, marker), protocol=4)
    # by INST, by a name on the stack, by the object of another call, by OBJ
    yield "INST", f"(S'{touch}'\nios\nsystem\n.".encode()
    yield "os.system", b"\x80\x04\x8c\x02os\x8c\x06system\x93" + pickle.dumps((touch,))[:-1] + b"R."
    yield "as a function", b"\x80\x02ccollections\nOrderedDict\n)R)R."
    yield "os.system", f"(cos\nsystem\nS'{touch}'\no.".encode()


def test_code_in_a_file_is_not_run(tmp_path):
    marker = tmp_path / "it_ran"
    path = tmp_path / "evil.pt"
    for word, program in programs(marker):
        torch_files.save_program(path, program)
        for accepts in (lambda name: False, is_harmless):
            with pytest.raises(UsageError) as raised:
                load(path, accepts)
            found = str(raised.value).replace("posix.", "os.").replace("getattr.", "")
            assert word.rpartition(".")[2] in found, word
            assert "\n" not in found
        assert not marker.exists(), word


def test_the_marker_of_the_test_above_works(tmp_path):
    marker = tmp_path / "it_ran"
    pickle.loads(next(programs(marker))[1])
    assert marker.exists()


def test_what_megatron_keeps_beside_tensors_stands_inert(tmp_path):
    given = {
        "args": argparse.Namespace(num_layers=2, path=Path("/a")),
        "rng": np.random.default_rng(0).bit_generator.state,
        "w": np.ones(3, np.float32),
    }
    torch_files.save(tmp_path / "a.pt", given)
    with pytest.raises(UsageError, match="names argparse.Namespace"):
        load(tmp_path / "a.pt")
    found = load(tmp_path / "a.pt", is_harmless)
    assert isinstance(found["args"], Inert)
    assert found["args"].kind == Global("argparse", "Namespace")
    assert found["args"].fields["num_layers"] == 2
    assert isinstance(found["args"].fields["path"], Inert)
    assert found["w"].read().tolist() == [1, 1, 1]


def test_a_file_that_is_cut_or_spoiled_is_one_sentence(tmp_path):
    path = tmp_path / "a.pt"
    torch_files.save(path, {"model": {"w": np.ones((4, 4), np.float32)}, "n": [1, 2]})
    whole = path.read_bytes()
    draw = np.random.default_rng(0)
    spoiled = [whole[:n] for n in range(0, len(whole), 11)]
    for _ in range(300):
        changed = bytearray(whole)
        changed[draw.integers(len(whole))] = draw.integers(256)
        spoiled.append(bytes(changed))
    for content in spoiled:
        path.write_bytes(content)
        try:
            arrays(load(path))
        except UsageError as error:
            assert str(path) in str(error) and "\n" not in str(error)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (b"\x80\x02}K\x01K\x02s", "has no end|exhausted"),
        (b"\x80\x02]" + b"\x85" * 50 + b"}h\x00.", "is damaged"),
        (b"\x80\x02}(K\x01K\x02\x86K\x03u.", "a key of its pickle is a tuple"),
        (b"\x80\x02(X\x07\x00\x00\x00storageX\x01\x00\x00\x000tQ.", "is damaged"),
        (b"\x80\x02\x8b" + (9000).to_bytes(4, "little") + b"\1" * 9000 + b".", "of 71993 bits"),
        (b"\x80\x02cargparse\nNamespace\n}R.", "without a tuple of arguments"),
        (b"garbage", "is damaged"),
    ],
)
def test_a_pickle_that_makes_no_sense_is_refused(program, words, tmp_path):
    torch_files.save_program(tmp_path / "a.pt", program)
    with pytest.raises(UsageError, match=words):
        load(tmp_path / "a.pt", is_harmless)


@pytest.mark.parametrize(
    "use",
    [
        b"}%sK\x01s",
        b"%sQ",
        b"ctorch._utils\n_rebuild_tensor_v2\n%sR",
        b"%s\x8c\x06system\x93",
        b"\x8c\x02os%s\x93",
    ],
)
def test_what_has_no_end_is_not_looked_at(use, tmp_path):
    """Tuples of twice the same tuple, a hundred deep: few bytes, and a text of 2^100 words."""
    endless = b")q\x00" + b"h\x00\x86q\x00" * 100
    torch_files.save_program(tmp_path / "a.pt", b"\x80\x02" + use % endless + b".")
    with pytest.raises(UsageError, match="is damaged"):
        load(tmp_path / "a.pt")


@pytest.mark.parametrize(
    ("shape", "strides"), [((4, 4), (4, 1)), ((2,), (4,)), ((2**40,), (0,)), ((2, 4), (0, 1))]
)
def test_a_tensor_beyond_its_storage_is_refused(shape, strides, tmp_path):
    numbers = ["(" + "".join(f"I{n}\n" for n in values) + "t" for values in (shape, strides)]
    storage = "(Vstorage\nctorch\nFloatStorage\nV0\nVcpu\nI4\ntQ"
    program = f"ctorch._utils\n_rebuild_tensor_v2\n({storage}I0\n{''.join(numbers)}I00\n)tR."
    torch_files.save_program(tmp_path / "a.pt", program.encode(), [np.ones(4, np.float32)])
    with pytest.raises(UsageError, match="a tensor of shape .* in 4 elements"):
        load(tmp_path / "a.pt")


def test_other_files_are_named(tmp_path):
    (tmp_path / "old.pt").write_bytes(pickle.dumps(0x1950A86A20F9469CFC6C))
    with pytest.raises(UsageError, match="torch before 1.6"):
        load(tmp_path / "old.pt")
    with pytest.raises(UsageError, match="none.pt: cannot be read"):
        load(tmp_path / "none.pt")
