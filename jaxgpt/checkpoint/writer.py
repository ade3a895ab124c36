"""Arrays to files by TensorStore, in the format of Orbax's `PyTreeCheckpointHandler`, which reads
them. Orbax's own writer calls TensorStore's `Spec.to_json` for each array, which leaks each string
that it returns (orbax 0.12.8, tensorstore 0.1.86: 30 kB a save of 30 arrays; use it when that is
mended), and does not say that one process has failed before all have come to its end."""

import functools
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

Tree = dict[str, Any]  # nested, of arrays or their shapes

SCRATCH_SUFFIX = ".orbax-checkpoint-tmp"  # of a checkpoint that is not complete
# A process writes several files of about this size at the same time, not one after the other.
DATA_FILE_BYTES = 2**28
FILES_AT_ONCE = 128
PART = "ocdbt.process_"  # of a process's folder, before its number
DICT_KEY = 2  # Orbax's number for a key of a dict


class Piece(NamedTuple):
    """A part of an array in the host's memory, written as one chunk."""

    name: str  # keys joined by dots
    shape: tuple[int, ...]  # of the whole array
    chunk: tuple[int, ...]
    index: tuple[slice, ...]
    data: np.ndarray


def copy_to_host(tree: Tree) -> list[Piece]:
    """Return this process's share of all arrays, which may be donated as soon as this returns.

    Of the devices with copies of a part, the one that has the fewest bytes to write until then
    writes it: all processes find the same.
    """
    found, loads = [], {}
    for path, array in jax.tree_util.tree_leaves_with_path(tree):
        chunk = array.sharding.shard_shape(array.shape)
        n_chunks = math.prod(a // b for a, b in zip(array.shape, chunk, strict=True))
        load = loads.setdefault(n_chunks, [0] * (array.sharding.num_devices // n_chunks))
        writer = load.index(min(load))
        load[writer] += array.nbytes // n_chunks
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        shards = [s for s in array.addressable_shards if s.replica_id == writer]
        found += [(name, array.shape, chunk, s.index, _on_host(s.data)) for s in shards]
    return [Piece(*rest, np.asarray(data)) for *rest, data in found]  # all are under way


def _on_host(data: jax.Array) -> jax.Array:
    """Start the copy of an array of one device to its host, whose pinned memory is faster."""
    if data.device.platform == "cpu" or data.sharding.memory_kind != "device":
        return data
    on_host = jax.sharding.SingleDeviceSharding(data.device, memory_kind="pinned_host")
    return jax.device_put(data, on_host)


def write_part(state: Path, rank: int, pieces: Sequence[Piece]) -> int:
    """Write the pieces of a process, down to the disk; return how many keys its part has."""
    import tensorstore

    # At once or not at all; else a failed write would leave others under way.
    transaction, context = tensorstore.Transaction(atomic=True), _context()
    let_interned_strings_grow()
    folder = state / f"{PART}{rank}"
    stores = {
        piece.name: tensorstore.open(
            {
                "driver": "zarr",
                "kvstore": _kvstore(folder) | {"path": f"{piece.name}/"},
                "metadata": {
                    "dtype": _zarr_dtype(piece.data.dtype),
                    "shape": piece.shape,
                    "chunks": piece.chunk,
                    "order": "C",
                    # Compression would take longer than writing, for 8 to 9 % of the size.
                    "compressor": None,
                    "fill_value": None,
                },
                "store_data_equal_to_fill_value": True,
            },
            create=True,
            open=True,
            context=context,
            transaction=transaction,
        )
        for piece in {piece.name: piece for piece in pieces}.values()
    }
    writes = [
        stores[piece.name]
        .result()[piece.index]
        .write(piece.data, can_reference_source_data_indefinitely=True)
        for piece in pieces
    ]
    for write in writes:
        write.copy.result()
    transaction.commit_async().result()
    return len(pieces) + len(stores)  # each array's part begins with its metadata


@functools.cache
def let_interned_strings_grow() -> None:
    """Let Python's table of interned strings grow at the first save, not in the middle of a run.

    TensorStore interns three strings for each array that it opens. They go again, but when some
    ten thousand have passed through the table, it moves to one of twice the size, by 1.9 MB.
    From Python 3.12 on they stay.
    """
    for number in range(2**16 if sys.version_info < (3, 12) else 0):
        sys.intern(f"passes through {number}")


def merge_parts(state: Path, keys: Sequence[int]) -> None:
    """Join the parts of all processes, with so many keys each, under one index.

    Raises `OSError` if one of them is not there, as on a disk that its process does not share.
    """
    import tensorstore

    context, transaction = _context(), tensorstore.Transaction(atomic=True)
    whole = tensorstore.KvStore.open(_kvstore(state), context=context).result()
    whole = whole.with_transaction(transaction)
    for rank, expected in enumerate(keys):
        if not expected:
            continue
        path = state / f"{PART}{rank}"
        part = tensorstore.KvStore.open(_kvstore(path), context=context).result()
        if (found := len(part.list().result())) != expected:
            raise OSError(f"{path} has {found} entries, not the {expected} that were written")
        part.experimental_copy_range_to(whole).result()
    transaction.commit_async().result()


def write_names(state: Path, tree: Tree) -> None:
    """Write the tree of arrays as Orbax's _METADATA, the first thing that it reads."""
    entries = {}
    for path, _ in jax.tree_util.tree_leaves_with_path(tree):
        keys = [jax.tree_util.keystr((key,), simple=True) for key in path]
        entries[str(tuple(keys))] = {
            "key_metadata": [{"key": key, "key_type": DICT_KEY} for key in keys],
            "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False},
        }
    content = {
        "tree_metadata": entries,
        "use_ocdbt": True,
        "use_zarr3": False,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }
    write_json(state / "_METADATA", content)


def make_folder(path: Path) -> None:
    """Make a folder and the one that it is in, which every process may do.

    Not those above them: a run directory that has vanished may be on a disk that has.
    """
    path.parent.mkdir(exist_ok=True)
    path.mkdir(exist_ok=True)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file, down to the disk."""
    with path.open("w") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Write the names in a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(scratch: Path) -> None:
    """Give a complete checkpoint its name."""
    for folder in (scratch / "state", scratch / "meta", scratch):
        sync_folder(folder)
    scratch.rename(scratch.with_name(scratch.name.removesuffix(SCRATCH_SUFFIX)))
    sync_folder(scratch.parent)


def _kvstore(folder: Path) -> dict[str, Any]:
    """Return TensorStore's description of an OCDBT database, with the settings of Orbax."""
    base = {"driver": "file", "path": f"{folder}/"}
    return {
        "driver": "ocdbt",
        # Data files have names of their own, which need no rename to be whole; the index does.
        "base": base | {"file_io_locking": {"mode": "non_atomic"}},
        "manifest": base,
        "target_data_file_size": DATA_FILE_BYTES,
    }


def _zarr_dtype(dtype: np.dtype) -> str:
    return dtype.name if dtype.name == "bfloat16" else dtype.newbyteorder("<").str


def _context() -> Any:
    import tensorstore

    return tensorstore.Context({"file_io_concurrency": {"limit": FILES_AT_ONCE}})
