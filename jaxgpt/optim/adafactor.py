"""Adafactor (arXiv 1804.04235, algorithms 4 and 5), without momentum."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxgpt.config import OptimizerConfig
from jaxgpt.models.weights import Weight
from jaxgpt.optim.parameters import Parameters, merge, select
from jaxgpt.parallel.sharding import Params

# Defaults from the paper (section 9) and from optax.adafactor.
DECAY_EXPONENT = 0.8  # the decay rate of update t is 1 - t^-0.8
SQUARES_EPSILON = 1e-30  # added to squared gradients
CLIPPING_THRESHOLD = 1.0  # maximum RMS of a matrix's update
MIN_SCALE = 1e-3  # lower bound on the RMS that an update is multiplied by
MIN_FACTORED = 128  # matrices with fewer rows or columns are not factored


class AdafactorState(NamedTuple):
    """Moving averages of squared gradients. Dimensions reduced by a mean have size 1."""

    count: jax.Array  # number of updates, an int32 scalar
    rows: Params  # means over the outputs, for factored matrices
    columns: Params  # means over the inputs, for factored matrices
    squares: Params  # unfactored averages, for all other parameters


def adafactor(config: OptimizerConfig, parameters: Parameters) -> optax.GradientTransformation:
    """Return Adafactor; the caller applies the learning rate.

    The direction (without weight decay) is multiplied by max(1e-3, RMS of the matrix or vector).
    The paper uses a learning rate of at most 1e-2. Each matrix in a stack is factored, clipped and
    scaled separately; `qkv` holds three matrices per layer. Embeddings are treated as matrices.
    Vectors, and matrices with fewer than 128 rows or columns, are not factored. If there is no
    weight decay and no vocabulary padding, the result for a single 2D matrix is the negative of
    optax.adafactor's result, up to rounding. However, optax.adafactor treats a stack as a single
    array.
    """
    factored = parameters.where(is_factored).weights
    others = parameters.where(lambda w: not is_factored(w)).weights

    def init(params: Params) -> AdafactorState:
        def zeros(weight: Weight, side: int) -> jax.Array:
            averaged = weight.matrix_dims[side]
            return jnp.zeros([1 if i in averaged else n for i, n in enumerate(weight.shape)])

        return AdafactorState(
            jnp.zeros([], jnp.int32),
            jax.tree.map(lambda w: zeros(w, 2), factored),
            jax.tree.map(lambda w: zeros(w, 1), factored),
            jax.tree.map(jnp.zeros_like, select(params, others)),
        )

    def update(
        gradients: Params, state: AdafactorState, params: Params
    ) -> tuple[Params, AdafactorState]:
        decay = 1.0 - (state.count + 1.0) ** -DECAY_EXPONENT

        def average(old: jax.Array, new: jax.Array) -> jax.Array:
            return decay * old + (1.0 - decay) * new

        def average_means(old: Params, side: int) -> Params:
            return jax.tree.map(
                lambda w, a, new: average(a, new.mean(w.matrix_dims[side], keepdims=True)),
                factored,
                old,
                select(squares, factored),
            )

        squares = jax.tree.map(lambda g: jnp.square(g) + SQUARES_EPSILON, gradients)
        rows, columns = average_means(state.rows, 2), average_means(state.columns, 1)
        new = AdafactorState(
            state.count + 1,
            rows,
            columns,
            jax.tree.map(average, state.squares, select(squares, others)),
        )
        directions = merge(
            jax.tree.map(_divide_factored, factored, select(gradients, factored), rows, columns),
            jax.tree.map(lambda g, s: g * s**-0.5, select(gradients, others), new.squares),
        )
        return jax.tree.map(_clip_and_scale, parameters.weights, directions, params), new

    return optax.chain(
        optax.GradientTransformation(init, update),
        optax.add_decayed_weights(config.weight_decay, parameters.is_decayed),
    )


def is_factored(weight: Weight) -> bool:
    """Return whether Adafactor keeps only row and column means for a weight."""
    _, *sides = weight.matrix_dims
    return all(math.prod(weight.shape[i] for i in dims) >= MIN_FACTORED for dims in sides)


def _divide_factored(
    weight: Weight, gradient: jax.Array, rows: jax.Array, columns: jax.Array
) -> jax.Array:
    """Return the gradient divided by sqrt(`rows` x `columns` / mean(`rows`)), as in algorithm 4.

    The square roots are taken separately, because `rows` x `columns` can underflow in float32.
    """
    relative = rows / rows.mean(weight.matrix_dims[1], keepdims=True)
    return gradient * relative**-0.5 * columns**-0.5


def _clip_and_scale(weight: Weight, direction: jax.Array, param: jax.Array) -> jax.Array:
    """Clip the RMS of each matrix's direction, then multiply the direction by the matrix's RMS.

    If the matrix's RMS is less than `MIN_SCALE`, multiply by `MIN_SCALE` instead. Vectors are
    handled like matrices.
    """
    _, inputs, outputs = weight.matrix_dims
    real = weight.shape[0] / (weight.shape[0] - weight.n_padding)  # to exclude padding from means

    def rms(x: jax.Array) -> jax.Array:
        return jnp.sqrt(real * jnp.square(x).mean(inputs + outputs, keepdims=True))

    clipped = direction / jnp.maximum(1.0, rms(direction) / CLIPPING_THRESHOLD)
    return clipped * jnp.maximum(rms(param), MIN_SCALE)
