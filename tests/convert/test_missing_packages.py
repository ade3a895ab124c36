"""If a package of an extra is not installed, the error names it."""

import sys

import pytest

from jaxgpt.config import UsageError
from jaxgpt.convert.nanogpt import from_nanogpt
from jaxgpt.convert.safetensors import open_folder, write_folder


def test_without_torch(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UsageError, match=r"pip install 'jaxgpt\[torch\]'"):
        from_nanogpt(tmp_path / "ckpt.pt", tmp_path / "ours")


def test_without_safetensors(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(UsageError, match=r"pip install 'jaxgpt\[hf\]'"):
        open_folder(tmp_path)
    with pytest.raises(UsageError, match=r"pip install 'jaxgpt\[hf\]'"):
        write_folder(tmp_path, [], {}, "float32")
