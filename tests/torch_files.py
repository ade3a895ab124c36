"""Files of torch.save: NumPy arrays as tensors, and pickles that torch would not write."""

import zipfile

import numpy as np
import pytest

torch = pytest.importorskip("torch")


def save(path, value):
    """Save dictionaries and lists of NumPy arrays as tensors."""
    torch.save(tensors(value), path)


def tensors(value):
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if isinstance(value, dict):
        return type(value)((key, tensors(item)) for key, item in value.items())
    return [tensors(item) for item in value] if isinstance(value, list) else value


def save_pickle(path, program):
    """Write the bytes of a pickle as torch.save would, with one storage of 16 bytes."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", program)
        archive.writestr("archive/byteorder", "little")
        archive.writestr("archive/data/0", bytes(16))
        archive.writestr("archive/version", "3\n")
