"""Spikes, found on the device from numbers of the whole batch: all processes find the same.

README.md says what a spike is, and what enters the window of `spike.window` steps.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.config import SpikeConfig

CAUSES = ("none", "loss", "grad_norm", "nonfinite")
NONE, LOSS, GRAD_NORM, NONFINITE = range(len(CAUSES))
DEVIATION_PER_MAD = 1.4826  # of a normal distribution: 1 / (the 3/4 quantile)
# A deviation is at least this part of the median: where all values are nearly the same, noise is
# no spike. At the default thresholds a spike is 3 % above the median loss, 10 % above the norm.
LEAST_DEVIATION = 0.005

SpikeState = dict[str, jax.Array]


class Detection(NamedTuple):
    """The findings about a step: device arrays."""

    cause: jax.Array  # int32, an index of CAUSES
    medians: jax.Array  # float32 (2,), of the window: of losses, and of gradient norms
    limits: jax.Array  # float32 (2,); infinite until the window is full
    nonfinite: jax.Array  # int32: how many steps in a row, up to this one, were not finite


def init_spike_state(spike: SpikeConfig) -> SpikeState:
    """Return what is remembered before the first step; nothing for spike.action=off.

    `window` are the newest losses and gradient norms, float32 (2, spike.window), the newest last;
    `filled` how many of them there are; `nonfinite` as in `Detection`.
    """
    if spike.action == "off":
        return {}
    return {
        "window": jnp.zeros((2, spike.window), jnp.float32),
        "filled": jnp.int32(0),
        "nonfinite": jnp.int32(0),
    }


def update(
    state: SpikeState, loss: jax.Array, grad_norm: jax.Array, spike: SpikeConfig
) -> tuple[SpikeState, Detection]:
    """Judge a step's values, and remember them."""
    window, values = state["window"], jnp.stack([loss, grad_norm]).astype(jnp.float32)
    medians, limits = spike_thresholds(window, spike)
    limits = jnp.where(state["filled"] >= spike.window, limits, jnp.inf)
    finite = jnp.isfinite(values).all()
    above = values > limits
    cause = jnp.where(above[0], LOSS, jnp.where(above[1], GRAD_NORM, NONE))
    cause = jnp.where(finite, cause, NONFINITE).astype(jnp.int32)
    longer = jnp.concatenate([window[:, 1:], jnp.minimum(values, limits)[:, None]], axis=1)
    state = {
        "window": jnp.where(finite, longer, window),
        "filled": jnp.minimum(state["filled"] + finite, spike.window),
        "nonfinite": jnp.where(finite, 0, state["nonfinite"] + 1),
    }
    return state, Detection(cause, medians, limits, state["nonfinite"])


def detect_and_gate(
    spike: SpikeConfig, state: SpikeState, loss: jax.Array, grad_norm: jax.Array
) -> tuple[SpikeState, Detection, jax.Array | None]:
    """Return the next state, what was found of a step, and whether to apply its update.

    The last is a boolean scalar, or None where the update is applied in any case.
    """
    if spike.action == "off":
        unknown = jnp.full(2, jnp.inf, jnp.float32)
        return state, Detection(jnp.int32(NONE), unknown, unknown, jnp.int32(0)), None
    state, detection = update(state, loss, grad_norm, spike)
    if spike.action == "skip_update":
        return state, detection, detection.cause == NONE
    return state, detection, detection.cause != NONFINITE


def spike_thresholds(window: jax.Array, spike: SpikeConfig) -> tuple[jax.Array, jax.Array]:
    """Return medians of a full window's losses and gradient norms, and what is a spike."""
    medians = _medians(window)
    deviations = DEVIATION_PER_MAD * _medians(jnp.abs(window - medians[:, None]))
    deviations = jnp.maximum(deviations, LEAST_DEVIATION * jnp.abs(medians))
    thresholds = jnp.array([spike.loss_threshold, spike.grad_norm_threshold], jnp.float32)
    return medians, medians + thresholds * deviations


def _medians(x: jax.Array) -> jax.Array:
    ordered, n = jnp.sort(x, axis=1), x.shape[1]
    return (ordered[:, (n - 1) // 2] + ordered[:, n // 2]) / 2


def spike_state_to_json(state: SpikeState) -> dict[str, Any]:
    """Return it for a checkpoint: JSON holds every float32 exactly."""
    return {key: np.asarray(value).tolist() for key, value in state.items()}


def spike_state_from_json(saved: dict[str, Any] | None, shapes: SpikeState) -> SpikeState:
    """Return what `spike_state_to_json` made, laid out as `shapes` say.

    Nothing is remembered from a checkpoint of a run that did not watch; of another spike.window
    the newest values are.
    """
    if not shapes:
        return {}
    saved = saved or {}
    kept = np.zeros(shapes["window"].shape, np.float32)
    old = np.array(saved.get("window", kept), np.float32)
    n = min(old.shape[1], kept.shape[1])
    kept[:, kept.shape[1] - n :] = old[:, old.shape[1] - n :]
    filled, nonfinite = min(saved.get("filled", 0), n), saved.get("nonfinite", 0)
    found = {"window": kept, "filled": np.int32(filled), "nonfinite": np.int32(nonfinite)}
    return {
        key: jax.make_array_from_callback(
            shape.shape, shape.sharding, lambda index, key=key: np.asarray(found[key])[index]
        )
        for key, shape in shapes.items()
    }
