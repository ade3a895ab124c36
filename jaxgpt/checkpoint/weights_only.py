"""Parameter-only checkpoints, written and read in parts that fit in memory.

`checkpointer.restore_params` restores these checkpoints onto any mesh. Orbax can only write arrays
that are in memory, so Orbax writes only the tree of names, and TensorStore writes the arrays.
"""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxgpt import __version__
from jaxgpt.checkpoint.checkpointer import silence_orbax
from jaxgpt.checkpoint.checksums import part_checksum
from jaxgpt.checkpoint.metadata import WEIGHTS_ONLY, add_checksum, read_meta
from jaxgpt.config import Config, ModelConfig, UsageError
from jaxgpt.models.weights import Weight, weights

STEP = 0  # weights-only checkpoints have this step number
CHUNK_BYTES = 2**25  # maximum size of a chunk, the smallest unit that a device can read
BLOCK_BYTES = 2**26  # limit on the bytes read at a time, unless the rows of one chunk are larger

Index = tuple[int | slice, ...]


class WeightsWriter:
    """Writes the parameters of a model to `directory`/checkpoints/0, in parts and in any order.

    The constructor creates this folder, which must not exist yet. The checkpoint is not valid until
    `close` has returned.
    """

    def __init__(self, directory: Path, model: ModelConfig):
        import orbax.checkpoint as ocp

        silence_orbax()
        self._folder = (directory / "checkpoints" / str(STEP)).absolute()
        self._weights = {w.name: w for w in jax.tree.leaves(weights(model))}
        self._stores: dict[str, Any] = {}
        self._sums = dict.fromkeys(self._weights, 0)
        self._todo = {name: weight.size for name, weight in self._weights.items()}
        names = {"params": jax.tree.map(lambda _: np.zeros(1, np.float32), weights(model))}
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False)) as checkpointer:
            checkpointer.save(self._folder / "state", args=ocp.args.PyTreeSave(names))

    def write(self, name: str, index: Index, array: np.ndarray) -> None:
        """Write `array` as float32 to the parameter `name`, at `index`.

        `index` consists of non-negative integers and slices with step 1, and may leave out trailing
        dims. `array` has the shape that `index` selects. Each element must be written exactly once.
        All parts of a parameter should have the same shape, because the first part determines the
        chunk shape. Raises `KeyError` if the model has no parameter `name`.
        """
        weight = self._weights[name]
        index = (*index, *[slice(None)] * (len(weight.shape) - len(index)))
        first = [i.start or 0 if isinstance(i, slice) else int(i) for i in index]
        sizes = iter(array.shape)
        part = np.ascontiguousarray(array, np.float32)
        part = part.reshape([next(sizes) if isinstance(i, slice) else 1 for i in index])
        if name not in self._stores:  # parts do not share chunks
            self._stores[name] = self._create(weight, chunk_shape(part.shape))
        place = tuple(slice(i, i + n) for i, n in zip(first, part.shape, strict=True))
        self._stores[name][place].write(part).result()
        self._sums[name] += part_checksum(part, first, weight.shape)
        self._todo[name] -= part.size

    def close(self, config: Config, tokenizer: Mapping[str, Any] | None, source: str) -> None:
        """Write the JSON of the checkpoint, after all parameters have been written.

        Args:
            config: configuration with the model's options.
            tokenizer: JSON of the model's tokenizer, or None if it is unknown.
            source: path that the parameters were imported from.
        """
        assert not any(self._todo.values()), self._todo
        self._stores.clear()
        meta = {
            "step": STEP,
            WEIGHTS_ONLY: True,
            "source": source,
            "config": config.to_dict(),
            "tokenizer": tokenizer,
            "checksums": {f"params/{name}": n % 2**32 for name, n in self._sums.items()},
            "data_fingerprint": [],
            "jaxgpt": __version__,
            "jax": jax.__version__,
        }
        (self._folder / "meta").mkdir()
        (self._folder / "meta" / "metadata").write_text(json.dumps(add_checksum(meta)))

    def _create(self, weight: Weight, chunks: tuple[int, ...]) -> Any:
        import tensorstore

        spec = _spec(self._folder / "state", weight.name) | {
            "metadata": {
                "shape": weight.shape,
                "chunks": chunks,
                "dtype": "<f4",
                "order": "C",
                "compressor": None,
                "fill_value": None,
            }
        }
        return tensorstore.open(spec, create=True, delete_existing=True).result()


class WeightsReader:
    """Reads the parameters of a checkpoint and verifies the checksum of each array."""

    def __init__(self, directory: Path, step: int):
        self._folder = (directory / "checkpoints" / str(step)).absolute()
        self._checksums = read_meta(directory, step)["checksums"]

    def blocks(self, weight: Weight) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the float32 array of a weight in parts.

        If the weight is stacked over layers, the items are (layer number from 0, layer). Otherwise,
        the items are (index of the first row, rows). Each read covers at most
        `BLOCK_BYTES`, unless the rows of one chunk are larger.

        Raises `UsageError` if the array cannot be read, does not have the shape of `weight`, or
        does not match its checksum, which is verified after the last part.
        """
        import tensorstore

        remedy, total = "choose another step", 0
        try:
            store = tensorstore.open(_spec(self._folder / "state", weight.name), read=True).result()
            if store.shape != weight.shape:
                raise ValueError(f"{weight.name} has shape {store.shape}, not {weight.shape}")
            in_one_piece = store.chunk_layout.read_chunk.shape[0]
            row_bytes = 4 * weight.size // weight.shape[0]
            at_once = in_one_piece * max(1, BLOCK_BYTES // (in_one_piece * row_bytes))
            for start in range(0, weight.shape[0], at_once):
                block = store[start : min(start + at_once, weight.shape[0])].read().result()
                total += part_checksum(block, [start] + [0] * (block.ndim - 1), weight.shape)
                if weight.n_layers:
                    yield from ((start + i, layer) for i, layer in enumerate(block))
                else:
                    yield start, block
        except ValueError as error:  # raised by TensorStore or the shape check
            reason = " ".join(str(error).split())[:200]
            raise UsageError(f"{self._folder}: cannot be read ({reason}); {remedy}") from None
        if total % 2**32 != self._checksums.get(f"params/{weight.name}"):
            raise UsageError(
                f"{self._folder}: params/{weight.name} does not match its checksum; {remedy}"
            )


def chunk_shape(part: tuple[int, ...]) -> tuple[int, ...]:
    """Return a chunk shape of at most `CHUNK_BYTES` for a float32 array of shape `part`.

    The largest dimension is halved until a chunk is small enough.
    """
    chunk = list(part)
    while 4 * math.prod(chunk) > CHUNK_BYTES:
        largest = max(range(len(chunk)), key=chunk.__getitem__)
        chunk[largest] = -(-chunk[largest] // 2)
    return tuple(chunk)


def _spec(state: Path, name: str) -> dict[str, Any]:
    """Return the TensorStore spec of a parameter in an Orbax checkpoint."""
    path = ".".join(["params", *name.split("/")])
    return {
        "driver": "zarr",
        # A file:// URL would need quoting if the path contains #, ? or %.
        "kvstore": {
            "driver": "ocdbt",
            "base": {"driver": "file", "path": f"{state}/"},
            "path": f"{path}/",
        },
    }
