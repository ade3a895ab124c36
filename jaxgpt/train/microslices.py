"""Into how many slices a CPU cuts its rows of a microbatch, to compute one after the other.

What a step keeps for its backward pass comes from the operating system anew every time, page by
page, filled with zeros, and passes through the caches once. With few rows at a time it is little:
less memory, and less time. The gradients of slices add up as those of microbatches do.
"""

import math

from jax.sharding import Mesh

from jaxgpt.config import Config, MeshShape
from jaxgpt.models.weights import count_parameters, layer_matrices

SLICE_BYTES = 2**29  # of activations; larger slices are slower, much smaller ones are too
GRADIENTS_PER_SLICE = 4  # at least so many times as large as the gradient that it adds to the sum


def choose_n_slices(config: Config, mesh: Mesh) -> int:
    """Return the number of equal slices that come nearest to `SLICE_BYTES` each.

    One where a slice would have to gather weights again, or talk to other devices between layers.
    parallel.remat changes nothing here: where it keeps less, slices take less memory still.

    Args:
        config: with model.vocab_size set, and rows that the mesh divides: none in a command that
            does not train.
    """
    shape = MeshShape(**mesh.shape)
    if shape.split_of("shards_parameters") * shape.split_of("splits_layers") > 1:
        return 1
    rows = config.microbatch_size // shape.split_of("splits_batch")
    gradient_bytes = 4 * count_parameters(config.model)[0]
    target = max(SLICE_BYTES, GRADIENTS_PER_SLICE * gradient_bytes) / activation_bytes(config)
    if rows <= max(1, target):
        return 1
    divisors = [n for n in range(1, rows + 1) if rows % n == 0]
    return min(divisors, key=lambda n: abs(math.log(rows / n / target)))


def activation_bytes(config: Config) -> int:
    """Return the float32 bytes that one row leaves for the backward pass without remat.

    A layer's are those of arXiv 2205.05198, equation 1, twice, since they are of 16 bits there: 10
    D of the stream, two for each column of the matrices, 24 D in GPT-2, and 5 H T. The output
    layer's are logits and their gradient, unless they are computed in chunks.
    """
    model = config.model
    T, L, D, H = model.block_size, model.n_layer, model.n_embd, model.n_head
    logits = 0 if config.train.loss_chunk else 8 * T * model.vocab_size
    products = 2 * sum(w.size for w in layer_matrices(model)) // (L * D)
    return 2 * T * L * (10 * D + products + 5 * H * T) + logits
