"""Safetensors (github.com/huggingface/safetensors): eight bytes with the length of a JSON header,
the header, the tensors. Read and written tensor by tensor, in one file or in shards."""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from jaxgpt.config import UsageError
from jaxgpt.convert.tensors import FLOATS, FileTensor

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_HEADER = 10**8  # bytes, the format's own limit
# name in a header -> dtype, bytes of an element
DTYPES = {
    "F64": ("float64", 8), "F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2),
    "I64": ("int64", 8), "I32": ("int32", 4), "I16": ("int16", 2), "I8": ("int8", 1),
    "U64": ("uint64", 8), "U32": ("uint32", 4), "U16": ("uint16", 2), "U8": ("uint8", 1),
    "BOOL": ("bool", 1), "F8_E4M3": ("float8_e4m3", 1), "F8_E5M2": ("float8_e5m2", 1),
}  # fmt: skip
NAMES = {dtype: name for name, (dtype, _) in DTYPES.items()}


def open_folder(folder: Path) -> dict[str, FileTensor]:
    """Return the tensors of a folder by name, without reading them: one file, or an index's."""
    if not folder.is_dir():
        raise UsageError(f"{folder}: is no folder; give one with config.json and {FILE}")
    if (folder / FILE).is_file():
        return open_file(folder / FILE)
    if not (folder / INDEX).is_file():
        others = ", ".join(sorted(path.name for path in folder.glob("*.bin"))[:3])
        raise UsageError(
            f"{folder}: has neither {FILE} nor {INDEX}"
            + (f", only {others}; save the model again with safe_serialization=True" * bool(others))
        )
    files = _read_index(folder / INDEX)
    opened = {name: open_file(folder / name) for name in sorted(set(files.values()))}
    missing = [tensor for tensor, name in files.items() if tensor not in opened[name]]
    if missing:
        where = folder / files[missing[0]]
        raise UsageError(f"{where}: has no {listed(missing)}, where {INDEX} says they are")
    return {tensor: opened[name][tensor] for tensor, name in files.items()}


def _read_index(path: Path) -> dict[str, str]:
    """Return the file of each tensor, from an index whose files are all in its folder."""
    files = read_json(path).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        raise UsageError(f"{path}: has no weight_map of tensors to file names")
    for name in sorted(set(files.values())):
        if Path(name).name != name or name in ("", ".", ".."):
            raise UsageError(f"{path}: names {name!r}, which is not a file of its folder")
        if not (path.parent / name).is_file():
            raise UsageError(f"{path}: names {name}, which is missing; copy it, too")
    return files


def open_file(path: Path) -> dict[str, FileTensor]:
    """Return the tensors of one file by name, without reading them; `UsageError` if damaged."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(MAX_HEADER, size - 8):
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            header = json.loads(file.read(length), object_pairs_hook=_unique)
        header.pop("__metadata__", None)
        _check_covered(header, size - 8 - length)
        return {
            name: _tensor(path, name, entry, 8 + length, size) for name, entry in header.items()
        }
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        reason = " ".join(str(error).split())[:120]
        raise UsageError(
            f"{path}: is no whole safetensors file ({reason}); copy or download it again"
        ) from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; refuse one that has a name twice, of which JSON takes the last."""
    out = dict(pairs)
    if len(out) < len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"its header has {twice} twice")
    return out


def _check_covered(header: Mapping[str, Any], size: int) -> None:
    """Refuse tensors that do not fill the file one after the other, as the format asks."""
    ends = 0
    for begin, end, name in sorted(
        (*entry["data_offsets"], name) for name, entry in header.items()
    ):
        if begin != ends:
            fault = "overlaps another tensor" if begin < ends else "comes after a gap"
            raise ValueError(f"{name} at {begin}:{end} {fault}; the one before ends at {ends}")
        ends = end
    if ends != size:
        raise ValueError(f"its tensors have {ends} of {size} bytes")


def _tensor(path: Path, name: str, entry: Mapping[str, Any], start: int, size: int) -> FileTensor:
    shape, (begin, end) = entry["shape"], entry["data_offsets"]
    if not all(type(n) is int and n >= 0 for n in [*shape, begin, end]):
        raise ValueError(f"{name} has shape {shape} at {begin}:{end}")
    dtype, itemsize = DTYPES.get(entry["dtype"], (str(entry["dtype"]), 0))
    if itemsize and math.prod(shape) * itemsize != end - begin:
        raise ValueError(f"{name} of {dtype} {shape} has {end - begin} bytes")
    if not begin <= end <= size - start:
        raise ValueError(f"{name} ends at {start + end} in a file of {size} bytes")
    return FileTensor(path, name, dtype, tuple(shape), start + begin)


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object; `UsageError` if the file is missing or something else."""
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: is no JSON ({error})") from None
    if not isinstance(found, dict):
        raise UsageError(f"{path}: is no JSON object")
    return found


def listed(names: Sequence[str], most: int = 5) -> str:
    """Return names for a sentence, the first few of many."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


class Writer:
    """Writes tensors in the order of `shapes`, into shards of at most `max_bytes` with an index.

    A tensor may come in pieces, a few rows after the others.
    """

    def __init__(
        self, folder: Path, shapes: Mapping[str, tuple[int, ...]], dtype: str, max_bytes: int
    ):
        self._dtype = np.dtype(FLOATS[dtype])
        shards: list[dict[str, tuple[int, ...]]] = [{}]
        room = max_bytes
        for name, shape in shapes.items():
            n_bytes = math.prod(shape) * self._dtype.itemsize
            if shards[-1] and n_bytes > room:
                shards.append({})
                room = max_bytes
            shards[-1][name] = shape
            room -= n_bytes
        self._folder, self._file = folder, None
        self._todo: list[str] = []  # of the open file
        self._written = 0  # elements of the first of them
        total = len(shards)
        names = [FILE] if total == 1 else [
            f"model-{i:05}-of-{total:05}.safetensors" for i in range(1, total + 1)
        ]  # fmt: skip
        self._shards = dict(zip(names, shards, strict=True))
        self._waiting = list(names)
        self._shapes = shapes

    def write(self, name: str, rows: np.ndarray) -> None:
        """Write the next rows of the next tensor, or all of it."""
        if not self._todo:
            self._begin_file()
        shape = tuple(self._shapes[name])
        self._written += rows.size
        assert self._todo[0] == name and rows.shape[1:] == shape[1:], name
        assert self._written <= math.prod(shape), name
        self._file.write(np.ascontiguousarray(rows, self._dtype).reshape(-1).view(np.uint8))
        if self._written == math.prod(shape):
            self._todo.pop(0)
            self._written = 0

    def close(self) -> None:
        """End the last file, and write the index of shards."""
        assert not self._waiting and not self._todo, self._todo
        self._end_file()
        if len(self._shards) > 1:
            total = sum(map(math.prod, self._shapes.values())) * self._dtype.itemsize
            files = {tensor: file for file, shard in self._shards.items() for tensor in shard}
            index = {"metadata": {"total_size": total}, "weight_map": files}
            (self._folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def _begin_file(self) -> None:
        self._end_file()
        name = self._waiting.pop(0)
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for tensor, shape in self._shards[name].items():
            end = offset + math.prod(shape) * self._dtype.itemsize
            header[tensor] = {
                "dtype": NAMES[self._dtype.name],
                "shape": list(shape),
                "data_offsets": [offset, end],
            }
            offset = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8
        self._todo = list(self._shards[name])
        self._file: BinaryIO = (self._folder / name).open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)

    def _end_file(self) -> None:
        if self._file is not None:
            self._file.close()
