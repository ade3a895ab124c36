"""Files as torch.save writes them, made without torch."""

import contextlib
import io
import pickle
import sys
import types
import zipfile
from collections import OrderedDict

import numpy as np


def _class(module, name):
    return type(name, (), {"__module__": module})


def _rebuild(*_):
    raise AssertionError("nothing of a file is run")


_rebuild.__module__, _rebuild.__name__ = "torch._utils", "_rebuild_tensor_v2"
_rebuild.__qualname__ = _rebuild.__name__
STORAGES = {
    np.dtype("float32"): _class("torch", "FloatStorage"),
    np.dtype("float16"): _class("torch", "HalfStorage"),
    np.dtype("int64"): _class("torch", "LongStorage"),
}


class _Storage:
    def __init__(self, key, array):
        self.key, self.array = key, array


class _Pickler(pickle.Pickler):
    """Pickles NumPy arrays as torch pickles tensors: each has a storage of its own."""

    def __init__(self, file):
        super().__init__(file, protocol=2)
        self.storages = []

    def persistent_id(self, value):
        if isinstance(value, _Storage):
            kind = STORAGES[value.array.dtype]
            return ("storage", kind, value.key, "cpu", value.array.size)
        return None

    def reducer_override(self, value):
        if not isinstance(value, np.ndarray):
            return NotImplemented
        storage = _Storage(str(len(self.storages)), value)
        self.storages.append(np.ascontiguousarray(value.T if value.flags.f_contiguous else value))
        strides = tuple(s // value.itemsize for s in value.strides)
        return _rebuild, (storage, 0, value.shape, strides, False, OrderedDict())


@contextlib.contextmanager
def _torch_modules():
    """Modules that pickle finds the names in."""
    found = {name: sys.modules.get(name) for name in ("torch", "torch._utils")}
    made = {name: types.ModuleType(name) for name in found}
    for kind in STORAGES.values():
        setattr(made["torch"], kind.__name__, kind)
    made["torch._utils"]._rebuild_tensor_v2 = _rebuild
    sys.modules.update(made)
    try:
        yield
    finally:
        for name, module in found.items():
            sys.modules.pop(name)
            if module is not None:
                sys.modules[name] = module


def save(path, value):
    """Write a value with NumPy arrays for tensors."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    with _torch_modules():
        pickler.dump(value)
    save_program(path, file.getvalue(), pickler.storages)


def save_program(path, program, storages=()):
    """Write a pickle's bytes and the storages that it names."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", program)
        archive.writestr("archive/byteorder", "little")
        for key, array in enumerate(storages):
            archive.writestr(f"archive/data/{key}", array.tobytes())
        archive.writestr("archive/version", "3\n")
