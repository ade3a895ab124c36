"""Spike detection, which runs on the devices.

The detector uses the loss and gradient norm of the whole batch, so all processes reach the same
decision. README.md defines spikes and the window.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.config import SpikeConfig

CAUSES = ("none", "loss", "grad_norm", "nonfinite")
NONE, LOSS, GRAD_NORM, NONFINITE = range(len(CAUSES))
# Standard deviation of a normal distribution whose median absolute deviation (MAD) is 1.
DEVIATION_PER_MAD = 1.4826
# Lower bound on the standard deviation, as a fraction of the median. Without this bound, tiny
# fluctuations would count as spikes if all values were nearly equal. With the default thresholds, a
# spike is at least 3% above the median loss or 10% above the median gradient norm.
LEAST_DEVIATION = 0.005

SpikeState = dict[str, jax.Array]


class Detection(NamedTuple):
    """The result of spike detection for one step, as arrays on the devices.

    If spike.action=off, the cause is `none`, `medians` and `limits` are infinite, and `nonfinite`
    is 0.
    """

    cause: jax.Array  # int32 scalar, an index into CAUSES
    medians: jax.Array  # float32 (2,): of losses and gradient norms, valid if the window is full
    limits: jax.Array  # float32 (2,): spike thresholds, which are infinite until the window is full
    nonfinite: jax.Array  # int32 scalar: number of consecutive non-finite steps up to this one


def init_spike_state(spike: SpikeConfig) -> SpikeState:
    """Return the detector's state before the first step, or an empty dict if spike.action=off.

    `window` holds the most recent losses and gradient norms, newest last: float32 (2,
    spike.window). `filled` is the number of steps in the window, an int32 scalar. `nonfinite` is
    the same number as in `Detection`.
    """
    if spike.action == "off":
        return {}
    return {
        "window": jnp.zeros((2, spike.window), jnp.float32),
        "filled": jnp.int32(0),
        "nonfinite": jnp.int32(0),
    }


def detect(
    state: SpikeState, loss: jax.Array, grad_norm: jax.Array, spike: SpikeConfig
) -> tuple[SpikeState, Detection]:
    """Check the loss and gradient norm of a step, and add them to the window.

    `loss` and `grad_norm` are scalars. Returns the next state and the detection. Values above the
    limits are clipped when they are added. A step with a non-finite value is not added. `state`
    must not be empty.
    """
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
    """Return the next state, the detection, and whether to apply the update of this step.

    `loss` and `grad_norm` are scalars. The third result is a boolean scalar, which is False for
    non-finite steps. With spike.action=skip_update, the third result is also False for spikes. With
    spike.action=off, every update is applied, the third result is None, and the detection has the
    cause `none`.
    """
    if spike.action == "off":
        unknown = jnp.full(2, jnp.inf, jnp.float32)
        return state, Detection(jnp.int32(NONE), unknown, unknown, jnp.int32(0)), None
    state, detection = detect(state, loss, grad_norm, spike)
    if spike.action == "skip_update":
        return state, detection, detection.cause == NONE
    return state, detection, detection.cause != NONFINITE


def spike_thresholds(window: jax.Array, spike: SpikeConfig) -> tuple[jax.Array, jax.Array]:
    """Return the medians and the spike thresholds of a full window: two float32 arrays (2,).

    `window` is float32 (2, spike.window), as in `init_spike_state`. The first element of each
    result is for losses, and the second is for gradient norms.
    """
    medians = _medians(window)
    deviations = DEVIATION_PER_MAD * _medians(jnp.abs(window - medians[:, None]))
    deviations = jnp.maximum(deviations, LEAST_DEVIATION * jnp.abs(medians))
    thresholds = jnp.array([spike.loss_threshold, spike.grad_norm_threshold], jnp.float32)
    return medians, medians + thresholds * deviations


def _medians(x: jax.Array) -> jax.Array:
    ordered, n = jnp.sort(x, axis=1), x.shape[1]
    return (ordered[:, (n - 1) // 2] + ordered[:, n // 2]) / 2


def spike_state_to_json(state: SpikeState) -> dict[str, Any]:
    """Return the state as numbers and lists for a checkpoint's JSON, without loss of precision."""
    return {key: np.asarray(value).tolist() for key, value in state.items()}


def spike_state_from_json(saved: dict[str, Any] | None, shapes: SpikeState) -> SpikeState:
    """Return the state that `spike_state_to_json` saved, with the shapes and shardings of `shapes`.

    If the detector is off, both `shapes` and the result are empty. If spike.window has changed, the
    newest values that fit are kept. If `saved` is None or empty, the window starts out empty.
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
