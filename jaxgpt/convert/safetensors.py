"""Read and write safetensors files, one tensor or one shard at a time."""

import contextlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from jaxgpt import config
from jaxgpt.config import UsageError, in_words
from jaxgpt.convert.tensors import FLOATS

WEIGHTS_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 500_000_000  # maximum size of a file, which is held in memory until it is written
DTYPES = ("F32", "F16", "BF16")  # safetensors' names for the dtypes in `FLOATS`


@dataclass(frozen=True)
class SafeTensor:
    """A tensor in a safetensors file. It stays on disk until it is read."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]

    def read(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return rows [start, stop) as float32, like `Tensor.read`.

        Raises `UsageError` if the rows cannot be read or their dtype is not in `DTYPES`.
        """
        if self.dtype not in DTYPES:
            raise UsageError(
                f"{self.path}: {self.name} has dtype {self.dtype}; weights must be one of "
                f"{', '.join(DTYPES)}"
            )
        # Reopen the file for each read, because pages stay in memory until the file is closed.
        with _opened(self.path) as file:
            is_whole = start == 0 and stop is None
            array = (
                file.get_tensor(self.name) if is_whole else file.get_slice(self.name)[start:stop]
            )
        return array.astype(np.float32, copy=False)


def open_folder(folder: Path) -> dict[str, SafeTensor]:
    """Return a dict that maps names to the tensors in a folder, without reading their data.

    Opens `WEIGHTS_FILE` if it exists, and otherwise the tensors that `INDEX` lists. Raises
    `UsageError` if the folder or a file is missing, if a file is unreadable or damaged, if a tensor
    in the index is missing, or if the `safetensors` package is not installed. Raises `OSError` if a
    path cannot be accessed.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder}: is not a folder; give one with config.json and {WEIGHTS_FILE}")
    if (folder / WEIGHTS_FILE).is_file():
        return open_file(folder / WEIGHTS_FILE)
    if not (folder / INDEX).is_file():
        others = ", ".join(sorted(path.name for path in folder.glob("*.bin"))[:3])
        remedy = "; give the folder of a Hugging Face model"
        if others:
            remedy = f", only {others}; save the model again with safe_serialization=True"
        raise UsageError(f"{folder}: has neither {WEIGHTS_FILE} nor {INDEX}{remedy}")
    files = _read_index(folder / INDEX)
    opened = {name: open_file(folder / name) for name in sorted(set(files.values()))}
    missing = [tensor for tensor, name in files.items() if tensor not in opened[name]]
    if missing:
        where = folder / files[missing[0]]
        raise UsageError(
            f"{where}: has no {listed(missing)}, which {INDEX} lists; download both files again"
        )
    return {tensor: opened[name][tensor] for tensor, name in files.items()}


def _read_index(path: Path) -> dict[str, str]:
    """Return a dict that maps the name of each tensor to its file name.

    Raises `UsageError` if the index is invalid, or if a file is not in the same folder.
    """
    files = read_json(path).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        raise UsageError(f"{path}: has no weight_map from tensors to file names")
    for name in sorted(set(files.values())):
        if Path(name).name != name or name in ("", ".", ".."):
            raise UsageError(f"{path}: lists {name!r}, which is not a file in the same folder")
        if not (path.parent / name).is_file():
            raise UsageError(f"{path}: lists {name}, which is missing; copy that file too")
    return files


def open_file(path: Path) -> dict[str, SafeTensor]:
    """Return a dict that maps names to the tensors in one file, without reading their data.

    Raises `UsageError` if the file cannot be read or is damaged, or if the `safetensors` package is
    not installed.
    """
    with _opened(path) as file:
        slices = {name: file.get_slice(name) for name in file.keys()}
        return {
            name: SafeTensor(path, name, part.get_dtype(), tuple(part.get_shape()))
            for name, part in slices.items()
        }


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a file. Raise `UsageError` if it cannot be read or is damaged."""
    package = _package()
    try:
        with package.safe_open(path, framework="np") as file:
            yield file
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({in_words(error)})") from None
    except package.SafetensorError as error:
        reason = " ".join(str(error).split())[:120]
        raise UsageError(
            f"{path}: is not a complete safetensors file ({reason}); copy or download it again"
        ) from None


def _package() -> ModuleType:
    try:
        import safetensors
    except ImportError:
        raise UsageError(
            "the safetensors package is not installed: run pip install 'jaxgpt[hf]' or "
            "pip install safetensors"
        ) from None
    return safetensors


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises `UsageError` if the file cannot be read or does not hold a JSON object.
    """
    try:
        return config.read_json(path, {})
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read as a JSON object ({in_words(error)})") from None


def listed(names: Sequence[str], most: int = 5) -> str:
    """Return up to `most` names and the number of other names, as text for an error message."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def write_folder(
    folder: Path,
    tensors: Iterable[tuple[str, np.ndarray]],
    shapes: Mapping[str, tuple[int, ...]],
    dtype: str,
) -> None:
    """Write tensors to one file, or to several shards and an index.

    Each shard is held in memory, because the `safetensors` package writes complete files. A tensor
    larger than `SHARD_BYTES` gets a separate shard.

    Args:
        folder: existing folder to write to.
        tensors: (name, rows) pairs in the order of `shapes`. A tensor may be split into several
            consecutive pairs.
        shapes: shape of each tensor by name. Each tensor must have at least one row.
        dtype: key of `FLOATS`.

    Raises `UsageError` if the `safetensors` package is not installed. Errors from writing a file
    and from iterating over `tensors` are propagated.
    """
    _package()
    from safetensors.numpy import save_file

    found, kind = iter(tensors), np.dtype(FLOATS[dtype])
    shards = _split_by_size(shapes, kind.itemsize)
    file_of = {}
    for number, names in enumerate(shards, 1):
        shard = {}
        for name in names:
            shard[name] = tensor = np.empty(shapes[name], kind)
            n_rows = 0
            while n_rows < len(tensor):
                given, rows = next(found)
                assert given == name, given
                tensor[n_rows : n_rows + len(rows)] = rows
                n_rows += len(rows)
        several = f"model-{number:05}-of-{len(shards):05}.safetensors"
        file = several if len(shards) > 1 else WEIGHTS_FILE
        save_file(shard, folder / file, metadata={"format": "pt"})
        file_of |= dict.fromkeys(names, file)
    if len(shards) > 1:
        total = sum(map(math.prod, shapes.values())) * kind.itemsize
        index = {"metadata": {"total_size": total}, "weight_map": file_of}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _split_by_size(shapes: Mapping[str, tuple[int, ...]], itemsize: int) -> list[list[str]]:
    """Return the names of the tensors in each shard."""
    shards: list[list[str]] = [[]]
    room = SHARD_BYTES
    for name, shape in shapes.items():
        n_bytes = math.prod(shape) * itemsize
        if shards[-1] and n_bytes > room:
            shards.append([])
            room = SHARD_BYTES
        shards[-1].append(name)
        room -= n_bytes
    return shards
