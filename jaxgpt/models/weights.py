"""A name, a shape and a role for every weight, from which all others read what they need."""

import functools
import math
from dataclasses import dataclass

import jax
from flax import nnx

from jaxgpt.config import ModelConfig
from jaxgpt.models.layers import padded_vocab_size
from jaxgpt.models.transformer import GPT
from jaxgpt.parallel.sharding import LogicalAxes, Params

STACKED_AXES = ("layers", "parts")  # logical axes along which separate matrices are stacked
DECAYED_ROLES = ("matrix", "token_embedding", "position_embedding")  # as GPT-2 and nanoGPT


@dataclass(frozen=True)
class Weight:
    """One array of parameters, in float32."""

    name: str  # its path in checkpoints and states: `layers/attention/qkv/kernel`
    shape: tuple[int, ...]
    axes: LogicalAxes  # what each dim means; `layers` comes first in those stacked over layers
    role: str  # matrix, bias, scale, token_embedding or position_embedding
    n_inputs: int = 0  # dims of a matrix, after `layers`, that a product sums over; 0 for a vector

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def n_layers(self) -> int:
        """Return how many layers are stacked in it; 0 for one outside of the layers."""
        return self.shape[0] if self.axes[0] == "layers" else 0

    @property
    def matrix_dims(self) -> tuple[tuple[int, ...], ...]:
        """Return the (stacked, input, output) dims.

        Each index of the stacked dims is a matrix of its own: of a layer, and in `qkv` of one of
        its parts, queries, keys or values.
        """
        stacked = tuple(i for i, axis in enumerate(self.axes) if axis in STACKED_AXES)
        others = tuple(i for i in range(len(self.shape)) if i not in stacked)
        return stacked, others[: self.n_inputs], others[self.n_inputs :]

    @property
    def is_decayed(self) -> bool:
        return self.role in DECAYED_ROLES

    @property
    def is_vector(self) -> bool:
        """Return whether it has one dim, in each layer."""
        return len(self.shape) - (self.n_layers > 0) == 1


@functools.cache
def weights(config: ModelConfig) -> Params:
    """Return the `Weight` of every parameter, in a nested dict as the parameters', without any.

    `config` has its `vocab_size`. Raises `UsageError` if an option names a layer that there is not.
    """
    model = nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0)))
    described = {}
    for path, param in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        metadata = param.get_metadata()
        stacked = ("layers",) if path[0] == "layers" else ()
        axes = stacked + metadata["logical_axes"]
        described[path] = Weight(
            "/".join(path), param.shape, axes, metadata["role"], metadata.get("n_inputs", 0)
        )
    return nnx.traversals.unflatten_mapping(described)


def layer_matrices(config: ModelConfig) -> list[Weight]:
    """Return the matrices of the layers, each stacked over all of them."""
    return [w for w in jax.tree.leaves(weights(config)) if w.role == "matrix" and w.n_layers]


def count_parameters(config: ModelConfig) -> tuple[int, int]:
    """Return the number of parameters, without padding of the vocabulary.

    Returns:
        (all, all but position embeddings): the second is how nanoGPT reports a model.
    """
    found = jax.tree.leaves(weights(config))
    padding = (padded_vocab_size(config.vocab_size) - config.vocab_size) * config.n_embd
    total = sum(w.size for w in found) - padding
    return total, total - sum(w.size for w in found if w.role == "position_embedding")


def activation_bytes(model: ModelConfig, with_logits: bool = True) -> int:
    """Return the float32 bytes that one row leaves for the backward pass without remat.

    A layer's are those of arXiv 2205.05198, equation 1, twice, since they are of 16 bits there: 10
    D of the stream, two for each column of the matrices, 24 D in GPT-2, and 5 H T. The output
    layer's are logits and their gradient.
    """
    T, L, D, H = model.block_size, model.n_layer, model.n_embd, model.n_head
    logits = 8 * T * model.vocab_size if with_logits else 0
    products = 2 * sum(w.size for w in layer_matrices(model)) // (L * D)
    return 2 * T * L * (10 * D + products + 5 * H * T) + logits
