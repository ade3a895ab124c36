"""Per-layer metrics, recorded every train.layers_every steps."""

import jax
import jax.numpy as jnp

from jaxgpt.data.batch import Batch
from jaxgpt.models.transformer import GPT
from jaxgpt.parallel.mesh import mesh_axes_with
from jaxgpt.parallel.schedule import split_microbatches
from jaxgpt.parallel.sharding import Params
from jaxgpt.parallel.zero import local_params
from jaxgpt.train.sharded_model import ShardedModel


def layer_values(
    model: ShardedModel, step: jax.Array, batch: Batch, gradients: Params, params: Params
) -> dict[str, jax.Array] | None:
    """Return the values for a `LayersRecord`, keyed by field name.

    Each value is a float32 array of shape (L,), with one element per layer. The values are zero
    unless `step` is a multiple of train.layers_every. If train.layers_every is 0, the result is
    None. Activations are measured in a separate forward pass, so the other steps are not slowed
    down.
    """
    every = model.config.train.layers_every
    if not every:
        return None
    compute = {
        "grad_norm": lambda: norms_L(gradients["layers"]),
        "weight_norm": lambda: norms_L(params["layers"]),
        "activation_rms": lambda: activation_rms_L(model, params, batch),
    }
    return jax.lax.cond(
        step % every == 0,
        lambda: {name: values_L() for name, values_L in compute.items()},
        lambda: dict.fromkeys(compute, jnp.zeros(model.config.model.n_layer)),
    )


def norms_L(arrays: Params) -> jax.Array:
    """Return the L2 norm of each layer, as a float32 array of shape (L,).

    `arrays` is a tree of float32 arrays (L, ...).
    """
    squares_L = (jnp.square(x).sum(range(1, x.ndim)) for x in jax.tree.leaves(arrays))
    return jnp.sqrt(sum(squares_L))


def activation_rms_L(model: ShardedModel, params: Params, batch: Batch) -> jax.Array:
    """Compute the RMS of each block's output over the global batch, with dropout off.

    The output is the residual stream after the block. Returns a float32 array of shape (L,).
    """
    B, T = batch.tokens.shape
    n = 1  # a pipeline splits the batch itself
    if not model.layer_axes:
        n = model.config.train.gradient_accumulation_steps * model.n_slices
    # Each device sums over its own rows and positions.
    over = [*mesh_axes_with("splits_batch", model.mesh), *model.context.sequence_axes]
    over += model.context.tensor_axes if model.context.sequence_parallel else ()

    def local(params: Params, batch: Batch) -> jax.Array:
        params, grad_accumulators = local_params(params, model.layouts)

        def squares_L(part: Batch) -> jax.Array:
            network: GPT = model.network(grad_accumulators, params)
            network.measures_blocks = True
            _, squares = model.schedule.run_all_blocks(network, part, None)
            return jnp.stack([squares[layer].sum() for layer in range(len(squares))])

        sums_L = jax.lax.map(squares_L, split_microbatches(batch, n)).sum(axis=0)
        return jax.lax.psum(sums_L, tuple(over)) if over else sums_L

    squares_L = model.run_on_shards(local, params, batch)
    return jnp.sqrt(squares_L / float(B * T * model.config.model.n_embd))  # may exceed int32
