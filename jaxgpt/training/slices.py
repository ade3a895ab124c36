"""Into how many slices a CPU cuts its rows of a microbatch, to compute one after the other.

What a step keeps for its backward pass comes from the operating system anew every time, page by
page, filled with zeros, and passes through the caches once. With few rows at a time it is little:
less memory, and less time. The gradients of slices add up as those of microbatches do.
"""

from jax.sharding import Mesh

from jaxgpt.config import Config, ModelConfig

SLICE_BYTES = 2**29  # of activations; larger slices are slower, much smaller ones are too


def n_slices(config: Config, mesh: Mesh) -> int:
    """The fewest equal slices whose activations fit into `SLICE_BYTES`, or single rows.

    One where a slice would have to gather weights again, or talk to other devices between layers.

    Args:
        config: with model.vocab_size set, and rows that the mesh divides.
    """
    if mesh.shape["fsdp"] * mesh.shape["tensor"] > 1:
        return 1
    rows = config.microbatch_size // mesh.shape["data"]
    fitting = max(1, SLICE_BYTES // activation_bytes(config.model))
    return next((n for n in range(1, rows + 1) if rows % n == 0 and rows // n <= fitting), 1)


def activation_bytes(model: ModelConfig) -> int:
    """Bytes that one row leaves for the backward pass, in float32: about.

    A layer's are those of arXiv 2205.05198, equation 1, twice, since they are of 16 bits there;
    the output layer's are logits and their gradient.
    """
    T, L, D, H = model.block_size, model.n_layer, model.n_embd, model.n_head
    return 2 * T * L * (34 * D + 5 * H * T) + 8 * T * model.vocab_size
