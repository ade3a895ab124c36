"""Loading torch.save files reads tensors and containers, and never runs code."""

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
from jaxgpt.convert.torch_file import Inert, TorchTensor, is_tensor, load

torch = pytest.importorskip("torch")


def read(tensor, *rows):
    return TorchTensor(Path("a.pt"), "x", tensor).read(*rows)


def read_all(value):
    """Read every tensor of nested containers."""
    if is_tensor(value):
        read(value)
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            read_all(item)


def test_tensors_and_containers_are_what_was_saved(tmp_path):
    w = torch.randn(3, 4)
    state = OrderedDict(
        a=w, half=torch.randn(5).half(), brain=torch.randn(5).bfloat16(), transposed=w.T,
        part=w[1:, 2], empty=w[:0], scalar=torch.tensor(2.5), parameter=torch.nn.Parameter(w),
    )  # fmt: skip
    given = {
        "model": state, "n": 7, "names": ["x", "y"], "pair": (1, None), "rate": 1e-3, "yes": True,
        "members": {1, 2}, "nested": {"deep": [{"w": w}]}, "large": 2**70, "long": "ab" * 200,
    }  # fmt: skip
    torch.save(given, tmp_path / "a.pt")
    found = load(tmp_path / "a.pt")
    for name, tensor in state.items():
        array = read(found["model"][name])
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array, tensor.detach().float().numpy())
    np.testing.assert_array_equal(read(found["nested"]["deep"][0]["w"]), w)
    for key in given.keys() - {"model", "nested"}:
        assert found[key] == given[key], key


def test_rows_are_read_alone(tmp_path):
    w = torch.arange(24.0).reshape(6, 4)
    torch.save([w, w.reshape(4, 6).T, w.bfloat16()], tmp_path / "a.pt")
    for found, given in zip(load(tmp_path / "a.pt"), (w, w.reshape(4, 6).T, w), strict=True):
        np.testing.assert_array_equal(read(found, 2, 5), given[2:5])


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.ones(3, dtype=torch.int64), "x has dtype int64; weights must be one of float32"),
        (torch.ones(3).to_sparse(), "x cannot be read"),
        (torch.ones(3, device="meta"), "x cannot be read"),
    ],
)
def test_other_tensors_are_named_when_they_are_read(tensor, words):
    with pytest.raises(UsageError, match=words):
        read(tensor)


class Runs:
    """Runs a function when its pickle is loaded as usual."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def programs(marker):
    """Yield pickles that create the marker file, or could with a small change."""
    touch = f"touch {marker}"
    code = f"open({str(marker)!r}, 'w')"
    yield pickle.dumps({"model": Runs(os.system, touch)}, protocol=2)
    yield pickle.dumps({"model": Runs(os.system, touch)})
    yield pickle.dumps(Runs(eval, code), protocol=2)
    yield pickle.dumps([Runs(exec, code)], protocol=2)
    yield pickle.dumps(Runs(functools.partial, os.system, touch), protocol=2)
    yield pickle.dumps(Runs(getattr, "x", "upper"), protocol=2)
    yield pickle.dumps(Runs(Path.touch, marker), protocol=4)
    # With INST, with a name on the stack, with the result of another call, with OBJ.
    yield f"(S'{touch}'\nios\nsystem\n.".encode()
    yield b"\x80\x04\x8c\x02os\x8c\x06system\x93" + pickle.dumps((touch,))[:-1] + b"R."
    yield b"\x80\x02ccollections\nOrderedDict\n)R)R."
    yield f"(cos\nsystem\nS'{touch}'\no.".encode()
    # A name in a harmless package that refers to another module.
    yield f"\x80\x02cmegatron.os\nsystem\nX\x01\0\0\0x\x85Rcos\nsystem\nV{touch}\n\x85R.".encode(
        "latin-1"
    )


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_code_in_a_file_is_not_run(tmp_path):
    marker = tmp_path / "it_ran"
    for number, program in enumerate(programs(marker)):
        torch_files.save_pickle(tmp_path / "evil.pt", program)
        for accepts in (lambda name: False, is_harmless):
            with pytest.raises(UsageError) as raised:
                load(tmp_path / "evil.pt", accepts)
            assert "weights_only" not in str(raised.value) and "\n" not in str(raised.value)
        assert not marker.exists(), number


def test_the_first_of_these_pickles_runs_when_it_is_loaded_as_usual(tmp_path):
    marker = tmp_path / "it_ran"
    pickle.loads(next(programs(marker)))
    assert marker.exists()


def test_a_class_that_could_run_code_is_named(tmp_path):
    torch_files.save_pickle(tmp_path / "a.pt", next(programs("x")))
    with pytest.raises(UsageError, match="contains posix.system, which is not a tensor"):
        load(tmp_path / "a.pt", is_harmless)


def test_objects_that_megatron_keeps_beside_tensors_become_inert(tmp_path):
    given = {
        "args": argparse.Namespace(num_layers=2, path=Path("/a"), dtype=torch.bfloat16),
        "rng": [{"np": np.random.get_state(), "torch": torch.get_rng_state()}],
        "w": torch.ones(3),
    }
    before = set(torch.serialization.get_safe_globals())
    torch.save(given, tmp_path / "a.pt")
    with pytest.raises(UsageError, match="contains argparse.Namespace"):
        load(tmp_path / "a.pt")
    found = load(tmp_path / "a.pt", is_harmless)
    assert isinstance(found["args"], Inert) and found["args"].fields["num_layers"] == 2
    assert isinstance(found["args"].fields["path"], Inert)
    assert isinstance(found["rng"][0]["np"][1], Inert)
    assert read(found["w"]).tolist() == [1, 1, 1]
    assert set(torch.serialization.get_safe_globals()) == before


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_file_that_is_cut_or_spoiled_is_one_sentence(tmp_path):
    path = tmp_path / "a.pt"
    torch.save({"model": {"w": torch.ones(4, 4)}, "n": [1, 2]}, path)
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
            read_all(load(path))
        except UsageError as error:
            assert "\n" not in str(error)


def rebuilt(n_elements, shape, strides):
    """Return the pickle of a tensor with the given sizes, which may be inconsistent."""
    storage = b"(X\7\0\0\0storagectorch\nFloatStorage\nX\1\0\0\x000X\3\0\0\0cpu%stQ"
    numbers = [pickle.dumps(value, protocol=2)[2:-1] for value in (n_elements, shape, strides)]
    return b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(%sK\0%s%s\x89}tR." % (
        storage % numbers[0], *numbers[1:]
    )  # fmt: skip


@pytest.mark.parametrize(
    ("n_elements", "shape", "strides"),
    [(4, (4, 4), (4, 1)), (4, (2,), (4,)), (2**20, (2**20,), (1,)), (4, (-1,), (1,))],
)
def test_a_tensor_beyond_its_storage_is_refused(n_elements, shape, strides, tmp_path):
    torch_files.save_pickle(tmp_path / "a.pt", rebuilt(4, (2, 2), (2, 1)))
    assert load(tmp_path / "a.pt").shape == (2, 2)
    torch_files.save_pickle(tmp_path / "a.pt", rebuilt(n_elements, shape, strides))
    with pytest.raises(UsageError, match="is not a complete torch.save file"):
        load(tmp_path / "a.pt")


def test_other_files_are_named(tmp_path):
    torch.save({"w": torch.ones(3)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "text.pt").write_text("no tensors")
    (tmp_path / "empty.pt").touch()
    for name in ("old.pt", "text.pt", "empty.pt"):
        with pytest.raises(UsageError, match=f"{name}: is not a complete torch.save file"):
            load(tmp_path / name)
    for name in ("none.pt", ""):
        with pytest.raises(UsageError, match="cannot be read"):
            load(tmp_path / name)


def test_a_torch_that_is_not_safe_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.9.1"))
    with pytest.raises(UsageError, match="torch 2.9.1 can run code .* pip install 'torch>=2.10'"):
        load(tmp_path / "a.pt")
