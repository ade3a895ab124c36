"""A name, a shape and a role for every weight, from which all others read what they need."""

import functools
import math
from dataclasses import dataclass

import jax
from flax import nnx

from jaxgpt.config import ModelConfig
from jaxgpt.models.attention import stores_scores
from jaxgpt.models.transformer import GPT
from jaxgpt.parallel.sharding import LogicalAxes, Params

STACKED_AXES = ("layers", "parts")  # logical axes along which separate matrices are stacked
VECTOR_ROLES = ("bias", "scale")
LOOKED_UP_ROLES = ("token_embedding", "position_embedding")  # unless the first is the output layer


@dataclass(frozen=True)
class Weight:
    """One array of parameters, in float32."""

    name: str  # its path in checkpoints and states: `layers/attention/qkv/kernel`
    shape: tuple[int, ...]
    axes: LogicalAxes  # what each dim means; `layers` comes first in those stacked over layers
    role: str  # matrix, bias, scale, token_embedding, position_embedding or output_embedding
    n_inputs: int = 0  # dims of a matrix, after `layers`, that a product sums over; 0 for a vector
    n_padding: int = 0  # rows of zeros at the end, which fill up a vocabulary

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def n_parameters(self) -> int:
        """Number of elements without padding."""
        return self.size // self.shape[0] * (self.shape[0] - self.n_padding)

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
        """Return whether weight decay applies to it: to matrices and embeddings, as in nanoGPT."""
        return self.role not in VECTOR_ROLES

    @property
    def gather_dtype(self) -> str | None:
        """The dtype of what is added or scales, float32; None is that of the computation."""
        return "float32" if self.role in (*VECTOR_ROLES, "position_embedding") else None


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
            name="/".join(path),
            shape=param.shape,
            axes=axes,
            role=metadata["role"],
            n_inputs=metadata.get("n_inputs", 0),
            n_padding=param.shape[0] - config.vocab_size if axes[0] == "vocab" else 0,
        )
    return nnx.traversals.unflatten_mapping(described)


def layer_matrices(config: ModelConfig) -> list[Weight]:
    """Return the matrices of the layers, each stacked over all of them."""
    return [w for w in jax.tree.leaves(weights(config)) if w.role == "matrix" and w.n_layers]


def count_parameters(config: ModelConfig) -> tuple[int, int]:
    """Return the number of parameters, without padding of the vocabulary.

    Returns:
        (all, all that multiply): the second leaves out embeddings that are only looked up, of
        positions and, where the output layer has weights of its own, of tokens. Of GPT-2 it is how
        nanoGPT reports a model.
    """
    found = jax.tree.leaves(weights(config))
    looked_up = LOOKED_UP_ROLES[1:] if config.tie_embeddings else LOOKED_UP_ROLES
    total = sum(w.n_parameters for w in found)
    return total, total - sum(w.n_parameters for w in found if w.role in looked_up)


def activation_bytes(model: ModelConfig, with_logits: bool = True) -> int:
    """Return the float32 bytes that one row leaves for the backward pass without remat.

    A layer's are those of arXiv 2205.05198, equation 1, twice, since they are of 16 bits there: 10
    D of the stream, two for each column of the matrices, 24 D in GPT-2, and 5 H T. The output
    layer's are logits and their gradient.
    """
    T, L, D, H = model.block_size, model.n_layer, model.n_embd, model.n_head
    logits = 8 * T * model.vocab_size if with_logits else 0
    products = 2 * sum(w.size for w in layer_matrices(model)) // (L * D)
    scores = 5 * H * T if stores_scores(model) else 0
    return 2 * T * L * (10 * D + products + scores) + logits
