"""Mapping between another program's tensors and slices of jaxgpt's arrays."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import jax
import numpy as np

from jaxgpt.checkpoint.weights_only import BLOCK_BYTES, WeightsReader, WeightsWriter
from jaxgpt.config import ModelConfig, UsageError
from jaxgpt.convert.names import Table, WeightRef
from jaxgpt.convert.safetensors import listed
from jaxgpt.convert.tensors import Tensor
from jaxgpt.models.layers import VOCAB_MULTIPLE
from jaxgpt.models.weights import Weight, weights


@dataclass(frozen=True)
class Slot:
    """Location of an external tensor in a jaxgpt array, which may be stacked over layers."""

    weight: Weight
    layer: int | None  # None if the array is not stacked over layers
    ref: WeightRef
    shape: tuple[int, ...]  # shape of the external tensor

    @property
    def index(self) -> tuple[int | slice, ...]:
        """The index into the jaxgpt array."""
        return (() if self.layer is None else (self.layer,)) + self.index_in_layer

    @property
    def index_in_layer(self) -> tuple[int | slice, ...]:
        if self.ref.part is None:
            return ()
        before = (slice(None),) if self.weight.role == "matrix" else ()
        return (*before, self.ref.part)

    def to_jaxgpt(self, tensor: np.ndarray) -> np.ndarray:
        """Convert a complete external tensor to the shape of the slice that `index` selects.

        Arrays with a vocabulary axis are not supported, because external tensors are not padded.
        """
        shape = _part_shape(self.weight, self.ref)
        if self.ref.form == "interleaved":  # rows are (H, 3, K)
            *inputs, _, H, K = shape
            found = tensor.reshape(H, 3, K, *inputs)
            return found.transpose(*([3] if inputs else []), 1, 0, 2)
        return (tensor.T if self.ref.form == "transposed" else tensor).reshape(shape)

    def to_external(self, array: np.ndarray) -> np.ndarray:
        """Convert the slice that `index` selects to the shape of the external tensor.

        "interleaved" tensors and arrays with vocabulary padding are not supported.
        """
        if self.ref.form == "transposed":
            return array.reshape(self.shape[::-1]).T
        assert self.ref.form == "same"  # there is no export to Megatron
        return array.reshape(self.shape)


def slots(table: Table, model: ModelConfig) -> dict[str, Slot]:
    """Return a dict that maps the external name of each tensor in a model to its slot.

    The slots are ordered by jaxgpt array, then by layer. Weights that are not in `table` have no
    slot. `model.vocab_size` must be set.

    Raises `OverflowError` or `TypeError` if a model dimension is too large for JAX. Also raises
    whatever `models.weights.weights` raises.
    """
    by_weight: dict[str, list[tuple[str, WeightRef]]] = {}
    for name, ref in table.items():
        by_weight.setdefault(ref.name, []).append((name, ref))
    out = {}
    for weight in jax.tree.leaves(weights(model)):
        for layer in range(weight.n_layers) if weight.n_layers else (None,):
            for name, ref in by_weight.get(weight.name, ()):
                shape = _external_shape(weight, ref, model)
                out[name.format(layer)] = Slot(weight, layer, ref, shape)
    return out


def _part_shape(weight: Weight, ref: WeightRef) -> tuple[int, ...]:
    """Return the shape of the part of a jaxgpt array that a slot's `index` selects."""
    shape = weight.shape[1:] if weight.n_layers else weight.shape
    if ref.part is None:
        return shape
    axis = 1 if weight.role == "matrix" else 0
    return shape[:axis] + shape[axis + 1 :]


def _external_shape(weight: Weight, ref: WeightRef, model: ModelConfig) -> tuple[int, ...]:
    shape = _part_shape(weight, ref)
    if weight.role != "matrix":
        if weight.axes[0] == "vocab":
            return (model.vocab_size, *shape[1:])  # without padding
        return shape if len(shape) == 2 and not weight.n_layers else (math.prod(shape),)
    # Either the inputs or the outputs have a single dimension, D.
    inputs = shape[0] if weight.axes[1] == "embed" else math.prod(shape[:-1])
    matrix = (inputs, math.prod(shape) // inputs)
    return matrix if ref.form == "same" else matrix[::-1]


def match_tensors(
    found: Mapping[str, Tensor], table: Table, model: ModelConfig, where: str
) -> dict[str, Slot]:
    """Return `slots(table, model)`, checked against the tensors in `found`.

    Raises `UsageError` if a tensor is missing or unknown, if a tensor has the wrong shape, or if
    the model is too large for JAX. The message begins with `where`. Also raises whatever `weights`
    raises.
    """
    if model.n_layer > len(found):
        raise UsageError(f"{where}: has {len(found)} tensors, too few for {model.n_layer} layers")
    try:
        wanted = slots(table, model)
    except (OverflowError, TypeError) as error:  # raised by JAX for sizes that overflow
        raise UsageError(f"{where}: invalid model dimensions ({error})") from None
    for names, what in (
        ([name for name in wanted if name not in found], "has no"),
        ([name for name in found if name not in wanted], "has tensors that do not fit the model:"),
    ):
        if names:
            raise UsageError(f"{where}: {what} {listed(names)}")
    for name, slot in wanted.items():
        if tuple(found[name].shape) != slot.shape:
            raise UsageError(
                f"{where}: {name} has shape {tuple(found[name].shape)}, but the configuration "
                f"requires {slot.shape}"
            )
    return wanted


def import_tensors(
    found: Mapping[str, Tensor], wanted: Mapping[str, Slot], writer: WeightsWriter
) -> None:
    """Write tensors into jaxgpt's arrays, one at a time.

    `match_tensors` returns `wanted` for `found`. Vocabulary padding is set to zero. Raises
    `UsageError` if a tensor cannot be read. Also raises whatever `writer` raises.
    """
    for name, slot in wanted.items():
        if slot.weight.axes[0] != "vocab":
            array = slot.to_jaxgpt(found[name].read())
            writer.write(slot.weight.name, slot.index, array)
            continue
        rows, width = slot.weight.shape
        at_once = max(1, BLOCK_BYTES // (4 * width * VOCAB_MULTIPLE)) * VOCAB_MULTIPLE
        for start in range(0, rows, at_once):
            stop = min(start + at_once, rows)
            array = np.zeros((stop - start, width), np.float32)
            real = found[name].read(start, min(stop, slot.shape[0]))  # the rest is padding
            array[: len(real)] = real
            writer.write(slot.weight.name, (slice(start, stop),), array)


def export_tensors(
    reader: WeightsReader, wanted: Mapping[str, Slot]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (name, float32 tensor) for each slot in `wanted`, in order.

    `wanted` must have the order of the dict that `slots` returns. Tensors outside the layers may be
    yielded in consecutive blocks of rows. Raises `UsageError` if the checkpoint cannot be read or
    is damaged.
    """
    by_layer: dict[tuple[str, int | None], list[tuple[str, Slot]]] = {}
    for name, slot in wanted.items():
        by_layer.setdefault((slot.weight.name, slot.layer), []).append((name, slot))
    for weight in {slot.weight.name: slot.weight for slot in wanted.values()}.values():
        for number, array in reader.blocks(weight):
            if weight.n_layers:
                for name, slot in by_layer[weight.name, number]:
                    yield name, slot.to_external(array[slot.index_in_layer])
                continue
            for name, slot in by_layer[weight.name, None]:
                if number < slot.shape[0]:  # later rows are vocabulary padding
                    yield name, array[: slot.shape[0] - number]
