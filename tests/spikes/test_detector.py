"""Spike detection on the device: its statistics, and how a step reacts to a spike."""

import json

import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxgpt.config import MeshShape, SpikeConfig, load_config, mesh_shape
from jaxgpt.parallel.mesh import make_mesh
from jaxgpt.spikes.detector import (
    CAUSES,
    detect,
    init_spike_state,
    spike_state_from_json,
    spike_state_to_json,
    spike_thresholds,
)
from jaxgpt.train.jitted import make_steps
from jobs import flat, limited_devices, scalars

SPIKE = SpikeConfig(window=32)
NOISE = 0.05


def normal(n, level=3.0, seed=0):
    """Return losses and gradient norms of normal steps."""
    draw = np.random.default_rng(seed).normal
    return np.stack([level + NOISE * draw(size=n), 1 + 0.1 * draw(size=n)], axis=1)


def watched(values, spike=SPIKE, watch=None):
    """Return the cause detected at each step, and the state after the last step."""
    seen = jax.jit(lambda watch, loss, norm: detect(watch, loss, norm, spike))
    watch, causes = watch or init_spike_state(spike), []
    for loss, grad_norm in np.float32(values):
        watch, verdict = seen(watch, loss, grad_norm)
        causes.append(CAUSES[int(verdict.cause)])
    return causes, watch


def flagged(causes):
    return [i for i, cause in enumerate(causes) if cause != "none"]


@pytest.mark.parametrize("size", [4, 31, 128])
def test_limits_are_those_of_the_median_and_the_median_absolute_deviation(size):
    window = np.random.default_rng(size).lognormal(size=(2, size)).astype(np.float32)
    spike = SpikeConfig(window=size, loss_threshold=5, grad_norm_threshold=9)
    medians, limits = spike_thresholds(window, spike)
    for row, threshold, median, limit in zip(window, (5, 9), medians, limits, strict=True):
        deviation = np.median(np.abs(row - np.median(row))) / 0.6744898  # normal: 3/4 quantile
        np.testing.assert_allclose(median, np.median(row), rtol=1e-6)
        np.testing.assert_allclose(limit, np.median(row) + threshold * deviation, rtol=1e-4)


def test_a_spike_is_found_and_hides_no_other():
    values = normal(200)
    values[100, 0] = values[103, 0] = 1e6
    values[150] = 3.5, 1.0  # 10 deviations above
    values[160, 1] = 5.0  # 40 deviations above
    values[170] = 0.5, 0.1  # a lower loss is not a spike
    causes, _ = watched(values)
    assert flagged(causes) == [100, 103, 150, 160]
    assert [causes[i] for i in (100, 150, 160)] == ["loss", "loss", "grad_norm"]


def test_what_is_not_finite_is_never_remembered():
    values = normal(100)
    bad = values.copy()
    places = [50, 51, 52, 80]
    for place, number in zip(places, (np.nan, np.inf, -np.inf, np.nan), strict=True):
        bad[place, place % 2] = number
    causes, watch = watched(bad)
    assert flagged(causes) == places and {causes[i] for i in places} == {"nonfinite"}
    _, expected = watched(np.delete(values, places, axis=0))
    assert (watch["window"] == expected["window"]).all()


def test_steps_in_a_row_that_are_not_finite_are_counted():
    _, watch = watched([(1.0, np.nan), (np.nan, 1.0)])
    assert int(watch["nonfinite"]) == 2
    _, watch = watched([(1.0, 1.0)], watch=watch)
    assert int(watch["nonfinite"]) == 0


def test_a_level_that_lasts_is_accepted_after_half_a_window():
    values = np.concatenate([normal(100), normal(100, level=4.0, seed=1)])
    found = flagged(watched(values)[0])
    assert found[0] == 100 and found == list(range(100, 100 + len(found)))
    assert 8 <= len(found) <= 20  # of a window of 32


def test_a_burst_longer_than_half_a_window_is_a_spike_until_its_end():
    """Clipping keeps the median near the limits, even if most of the window is above them."""
    values = normal(100)
    values[60:80, 0] = 100  # 20 steps, in a window of 32
    assert flagged(watched(values)[0]) == list(range(60, 80))


def test_nothing_is_a_spike_before_the_window_is_full_or_where_it_is_constant():
    early = normal(40)
    early[31, 0] = 100
    assert flagged(watched(early)[0]) == []
    constant = np.full((100, 2), 2.0)
    constant[50:, 0] += 1e-5 * np.arange(50)
    assert flagged(watched(constant)[0]) == []
    constant[99, 0] = 2.2
    assert flagged(watched(constant)[0]) == [99]


def test_what_is_remembered_survives_json_exactly():
    _, watch = watched(normal(20))
    mesh = make_mesh(MeshShape(8))

    def shapes(spike):
        where = NamedSharding(mesh, PartitionSpec())
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
            init_spike_state(spike),
        )

    saved = json.loads(json.dumps(spike_state_to_json(watch)))
    found = spike_state_from_json(saved, shapes(SPIKE))
    assert all((found[key] == value).all() for key, value in watch.items())
    assert all(found[key].dtype == value.dtype for key, value in watch.items())
    shorter = spike_state_from_json(saved, shapes(SpikeConfig(window=8)))
    assert (shorter["window"] == watch["window"][:, -8:]).all() and int(shorter["filled"]) == 8
    longer = spike_state_from_json(saved, shapes(SpikeConfig(window=64)))
    assert (longer["window"][:, -20:] == watch["window"][:, -20:]).all()
    assert int(longer["filled"]) == 20
    assert int(spike_state_from_json(None, shapes(SPIKE))["filled"]) == 0
    assert spike_state_from_json(saved, {}) == {}


MODEL = (
    "shakespeare_char_cpu", "model.n_layer=1", "model.n_embd=32", "model.block_size=32",
    "model.vocab_size=64", "train.batch_size=16", "optimizer.warmup_iters=0",
)  # fmt: skip


def setup(*options):
    """Return a run's compiled functions on the devices of --mesh (or eight), and a batch."""
    config = load_config(*MODEL, "--mesh", "8,1,1", *options)
    sizes = mesh_shape(config)
    with limited_devices(sizes.n_devices):
        steps = make_steps(config, make_mesh(sizes))
    rows = np.random.default_rng(0).integers(0, 64, (16, 33)).astype(np.int32)
    return steps, jax.device_put(rows, steps.batch_shape.sharding)


def trained(steps, batch, n):
    """Return the state and metrics after each of n steps on the same batch, as NumPy arrays."""
    state, out = steps.init(), []
    for step in range(1, n + 1):
        state, metrics = steps.train_step(state, *scalars(steps.model.config, step), batch)
        out.append(jax.tree.map(np.asarray, (state, metrics)))
    return out


def same(a, b):
    a, b = flat(a[:2]), flat(b[:2])  # parameters, moments and Adam's count
    return all((a[name] == b[name]).all() for name in b)


def updates(state):
    """Return the number of updates that AdamW has made."""
    return optax.tree_utils.tree_get(state.opt_state, "count")


@pytest.mark.parametrize(
    "options",
    [
        ("--mesh", "2,2,2", "parallel.sequence_parallel=True", "faults.nan_device=5"),
        *(
            pytest.param(options, marks=pytest.mark.long)
            for options in (
                (
                    "--mesh",
                    "1,8,1",
                    "train.gradient_accumulation_steps=2",
                    "spike.action=skip_update",
                ),
                ("--mesh", "8,1,1", "parallel.offload=moments", "parallel.zero_stage=0"),
                ("--mesh", "2,2,2", "parallel.offload=state", "parallel.scan_layers=True"),
            )
        ),
    ],
    ids=" ".join,
)
def test_a_gradient_of_one_device_that_is_no_number_changes_nothing(options):
    steps, batch = setup(*options, "faults.nan_step=3")
    found = trained(steps, batch, 6)
    (before, _), (after, metrics) = found[1], found[2]
    assert np.isnan(metrics.scalars["grad_norm"]) and CAUSES[metrics.detection.cause] == "nonfinite"
    assert np.isfinite(metrics.loss) and metrics.detection.nonfinite == 1
    assert same(after, before) and updates(after) == 2
    for (before, _), (after, metrics) in zip(found[2:], found[3:], strict=False):
        assert np.isfinite(metrics.scalars["grad_norm"]) and metrics.detection.cause == 0
        assert not same(after, before)
        assert updates(after) == updates(before) + 1


def test_with_off_it_spoils_the_parameters():
    steps, batch = setup("--mesh", "1,1,1", "faults.nan_step=2", "spike.action=off")
    (_, _), (state, metrics) = trained(steps, batch, 2)
    assert state.spike_state == {} and metrics.detection.cause == 0
    assert any(np.isnan(array).any() for array in flat(state.params).values())


@pytest.mark.parametrize("action", ["log", "skip_update"])
def test_only_skip_update_leaves_out_a_spike(action):
    steps, batch = setup(
        "--mesh", "1,1,1", f"spike.action={action}", "spike.window=4", "spike.loss_threshold=20"
    )
    state = steps.init()
    for step in range(1, 60):  # until the model has memorized the batch
        state, metrics = steps.train_step(state, *scalars(steps.model.config, step), batch)
    other = np.random.default_rng(1).integers(0, 64, (16, 33)).astype(np.int32)
    before = jax.tree.map(np.array, state)
    state, metrics = steps.train_step(
        state, *scalars(steps.model.config, 60), jax.device_put(other, steps.batch_shape.sharding)
    )
    assert (
        CAUSES[int(metrics.detection.cause)] == "loss"
        and metrics.loss > metrics.detection.limits[0]
    )
    assert same(state, before) == (action == "skip_update")


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        ("--mesh", "2,2,2"),
        ("--mesh", "1,2,4", "train.loss_chunk=16", "train.gradient_accumulation_steps=4"),
    ],
    ids=" ".join,
)
def test_losses_of_rows_are_those_of_each_row_alone(options):
    steps, batch = setup(*options)
    params = steps.init().params
    alone, _ = setup("--mesh", "1,1,1", "train.batch_size=1")
    lone_params = jax.tree.map(np.asarray, params)
    expected = [float(alone.eval_step(lone_params, row[None])[0]) for row in np.asarray(batch)]
    assert len(set(expected)) == 16
    (_, metrics), *_ = trained(steps, batch, 1)
    np.testing.assert_allclose(metrics.row_losses, expected, rtol=1e-5)
    np.testing.assert_allclose(metrics.loss, np.mean(expected), rtol=1e-5)
    np.testing.assert_allclose(steps.eval_step(params, batch), expected, rtol=1e-5)
