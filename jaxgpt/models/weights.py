"""The list of all weights, with the name, shape, logical axes and role of each weight."""

import functools
import math
from dataclasses import dataclass

import jax
from flax import nnx

from jaxgpt.config import ModelConfig, UsageError
from jaxgpt.models.attention import stores_scores
from jaxgpt.models.transformer import GPT
from jaxgpt.parallel.sharding import LOGICAL_AXES, LogicalAxes, Params

STACKED_AXES = ("layers", "parts")  # logical axes along which separate matrices are stacked
VECTOR_ROLES = ("bias", "scale")
# Embeddings used for lookups. If weights are tied, the token embedding is also the output layer's
# matrix.
LOOKED_UP_ROLES = ("token_embedding", "position_embedding")


@dataclass(frozen=True)
class Weight:
    """Description of one float32 parameter array."""

    name: str  # path in states and checkpoints, such as `layers/attention/qkv/kernel`
    shape: tuple[int, ...]
    axes: LogicalAxes  # logical axis of each dim; `layers` is first if the weight is in the layers
    role: str  # matrix, bias, scale, token_embedding, position_embedding or output_embedding
    n_inputs: int = 0  # number of dims that a matmul or a lookup contracts; 0 for a vector
    n_padding: int = 0  # number of zero rows that pad the vocabulary

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def n_parameters(self) -> int:
        """Number of elements without padding."""
        return self.size // self.shape[0] * (self.shape[0] - self.n_padding)

    @property
    def n_layers(self) -> int:
        """Number of layers stacked in this array; 0 for a weight outside the layers."""
        return self.shape[0] if self.axes[0] == "layers" else 0

    @property
    def matrix_dims(self) -> tuple[tuple[int, ...], ...]:
        """The indices of the stacked dims, of the input dims and of the output dims.

        A weight in the layers has a separate matrix for each layer and, if it has parts (such as
        `qkv`), for each part. The stacked dims index these matrices. In every embedding, including
        the output embedding, the first dim counts as the input dim.
        """
        stacked = tuple(i for i, axis in enumerate(self.axes) if axis in STACKED_AXES)
        others = tuple(i for i in range(len(self.shape)) if i not in stacked)
        return stacked, others[: self.n_inputs], others[self.n_inputs :]

    @property
    def is_decayed(self) -> bool:
        """True for matrices and embeddings, the only weights with weight decay (as in nanoGPT)."""
        return self.role not in VECTOR_ROLES

    @property
    def gather_dtype(self) -> str | None:
        """Dtype of the gathered weight: `float32`, or None for the compute dtype.

        Biases, norm scales and position embeddings stay in float32.
        """
        return "float32" if self.role in (*VECTOR_ROLES, "position_embedding") else None


@functools.cache
def weights(config: ModelConfig) -> Params:
    """Return the `Weight` of every parameter, with the nested structure of the parameters.

    No parameter is allocated. The result is cached, so do not modify it. Raises `UsageError` if a
    weight has an unknown logical axis.
    """
    model = nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0)))
    described = {}
    for path, param in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        metadata = param.get_metadata()
        stacked = ("layers",) if path[0] == "layers" else ()
        axes = stacked + metadata["logical_axes"]
        if unknown := set(axes) - {None, *LOGICAL_AXES}:  # would be replicated silently
            raise UsageError(
                f"{'/'.join(path)}: has the logical axis {unknown.pop()!r}, which has no partition "
                f"rule; use None or one of {', '.join(LOGICAL_AXES)}"
            )
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
    """Return the matrices inside the layers, each stacked over all layers."""
    return [w for w in jax.tree.leaves(weights(config)) if w.role == "matrix" and w.n_layers]


def count_parameters(config: ModelConfig) -> tuple[int, int]:
    """Return the total number of parameters, and the number without lookup embeddings.

    Vocabulary padding is not counted. Lookup embeddings are the position embeddings and, if weights
    are untied, the token embeddings. If weights are tied, the second number is the one that nanoGPT
    reports for the same vocab_size.
    """
    found = jax.tree.leaves(weights(config))
    looked_up = LOOKED_UP_ROLES[1:] if config.tie_embeddings else LOOKED_UP_ROLES
    total = sum(w.n_parameters for w in found)
    return total, total - sum(w.n_parameters for w in found if w.role in looked_up)


def activation_bytes(model: ModelConfig, with_logits: bool = True) -> int:
    """Estimate the bytes of float32 activations that the backward pass needs for one row.

    Without remat, each layer keeps 2 T (10 D + P + S) bytes. This is equation 1 of arXiv
    2205.05198, multiplied by 2 because the paper's activations are 16-bit. P, the term for the
    matmuls, is 2 / D times the number of elements in the layer's matrices. In GPT-2, P is 24 D. S,
    the term for the attention scores, is 5 H T if the scores are stored, and 0 if they are not.

    Args:
        model: model options, with vocab_size set.
        with_logits: include the logits and their gradient, 8 T V bytes.
    """
    T, L, D, H = model.block_size, model.n_layer, model.n_embd, model.n_head
    products = 2 * sum(w.size for w in layer_matrices(model)) // (L * D)
    logits = 8 * T * model.vocab_size if with_logits else 0
    scores = 5 * H * T if stores_scores(model) else 0
    return 2 * T * L * (10 * D + products + scores) + logits
