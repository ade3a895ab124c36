"""The doctor's collectives on eight devices, compared with NumPy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxgpt.cluster.process_group import ProcessGroup
from jaxgpt.config import MeshShape
from jaxgpt.doctor import collectives as module
from jaxgpt.doctor.collectives import (
    COLLECTIVE_TESTS,
    SIZES,
    Measurement,
    collective_checks,
    measure,
    measure_axis,
)
from jaxgpt.parallel.mesh import make_mesh
from jaxgpt.perf.collectives import ring_bytes
from jobs import limited_devices

BY_NAME = {c.name: c for c in COLLECTIVE_TESTS}
CLUSTER = ProcessGroup("test")


def by_numpy(name, x):
    """Return the expected results of n devices; x[i] is the input of device i."""
    n = len(x)
    parts = x.reshape(n, n, -1)
    return {
        "all-reduce": lambda: np.broadcast_to(x.sum(0), x.shape),
        "all-gather": lambda: np.broadcast_to(x.reshape(-1), (n, x.size)),
        "reduce-scatter": lambda: parts.sum(0),
        "all-to-all": lambda: parts.swapaxes(0, 1).reshape(n, -1),
        "collective-permute": lambda: np.roll(x, 1, axis=0),
    }[name]()


@pytest.mark.parametrize("collective", COLLECTIVE_TESTS, ids=lambda c: c.name)
def test_each_collective_computes_the_correct_result(collective):
    x = np.random.default_rng(0).integers(0, 100, (8, 16)).astype(np.float32)
    mesh = make_mesh(MeshShape(8))
    where = NamedSharding(mesh, PartitionSpec("data"))
    run = jax.shard_map(
        lambda x: collective.run(x[0], "data", 8)[None],
        mesh=mesh, in_specs=where.spec, out_specs=where.spec, check_vma=False,
    )  # fmt: skip
    found = jax.jit(run)(jax.device_put(x, where))
    np.testing.assert_array_equal(found, by_numpy(collective.name, x))


def test_every_axis_of_a_mesh_is_checked_and_timed(monkeypatch):
    monkeypatch.setattr(module, "REPETITIONS", dict.fromkeys(SIZES, 1))
    mesh = make_mesh(MeshShape(2, 1, 4))
    for axis, n in (("data", 2), ("tensor", 4)):
        heard = []
        found = measure_axis(mesh, axis, CLUSTER, 0.0, heard.append)
        # No time is left for larger sizes, but every collective is checked once.
        assert sorted(m.collective for m in found) == sorted(BY_NAME)
        assert {m.bytes for m in found} == {1024}
        assert {(m.axis, m.n, m.error) for m in found} == {(axis, n, None)}
        assert all(m.seconds > 0 for m in found)
        assert f"collective-permute over {axis}, 1 KiB" in heard
        checks = collective_checks(found, peak=None)
        assert [c.name for c in checks] == [f"{c.name} over {axis}" for c in COLLECTIVE_TESTS]
        assert {c.status for c in checks} == {"OK"}
        for check, collective in zip(checks, COLLECTIVE_TESTS, strict=True):
            assert collective.meaning in check.finding


@pytest.mark.long
def test_sizes_grow_to_64_mib_while_there_is_time(monkeypatch):
    assert (SIZES[0], SIZES[-1]) == (1024, 64 * 2**20)
    with limited_devices(2):
        mesh = make_mesh(MeshShape(2, 1, 1))
    monkeypatch.setattr(module, "COLLECTIVE_TESTS", [BY_NAME["collective-permute"]])
    monkeypatch.setattr(module, "MAX_SECONDS", 60.0)
    found = measure_axis(mesh, "data", CLUSTER, 60.0, lambda what: None)
    assert [m.bytes for m in found] == list(SIZES)
    assert {m.error for m in found} == {None}


def test_a_slow_collective_is_not_timed_with_larger_arrays(monkeypatch):
    monkeypatch.setattr(module, "measure", lambda mesh, axis, c, size: 3.0)
    found = measure_axis(make_mesh(MeshShape(8)), "data", CLUSTER, 60.0, lambda what: None)
    assert {m.bytes for m in found} == {1024}


BROKEN = {
    "all-reduce": lambda x, axis, n: x,
    "all-gather": lambda x, axis, n: lax.all_gather(x, axis, tiled=True)[::-1],
    "reduce-scatter": lambda x, axis, n: jnp.split(x, n)[0],
    "all-to-all": lambda x, axis, n: x,
    "collective-permute": lambda x, axis, n: lax.ppermute(
        x, axis, [(i, (i - 1) % n) for i in range(n)]
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_wrong_result_fails(name):
    broken = dataclasses.replace(BY_NAME[name], run=BROKEN[name])
    for mesh, axis in (((8, 1, 1), "data"), ((2, 4, 1), "fsdp")):
        with pytest.raises(ArithmeticError, match="wrong result: element"):
            measure(make_mesh(MeshShape(*mesh)), axis, broken, 1024)


def test_groups_along_an_axis_are_not_mixed_up():
    broken = dataclasses.replace(
        BY_NAME["all-reduce"], run=lambda x, axis, n: lax.psum(x, ("data", "fsdp"))
    )
    with pytest.raises(ArithmeticError, match="wrong result: element"):
        measure(make_mesh(MeshShape(4, 2, 1)), "data", broken, 1024)


def test_a_failed_collective_does_not_stop_the_others(capsys, monkeypatch):
    def refuse(x, axis, n):
        raise RuntimeError("NCCL error\nwith a long story")

    broken = dataclasses.replace(BY_NAME["all-reduce"], run=refuse)
    some = [broken if c.name == broken.name else c for c in COLLECTIVE_TESTS]
    monkeypatch.setattr(module, "COLLECTIVE_TESTS", some)
    found = measure_axis(make_mesh(MeshShape(8)), "data", CLUSTER, 0.0, lambda what: None)
    checks = {c.name: c for c in collective_checks(found, peak=None)}
    failed = checks["all-reduce over data"]
    assert failed.status == "FAIL"
    assert failed.finding == "at 1 KiB, process 0: RuntimeError: NCCL error"
    assert "NCCL_DEBUG" in failed.remedy
    # The error is also printed immediately, because other processes may never receive it.
    said = "process 0: all-reduce over data, 1 KiB: RuntimeError: NCCL error"
    assert capsys.readouterr().err.strip() == said
    assert checks["collective-permute over data"].status == "OK"


def test_a_network_far_slower_than_its_data_sheet_is_a_warning():
    def checks(bandwidth, n_bytes=2**26):
        everything = [
            Measurement(c.name, "data", 8, n_bytes, 0.1, bandwidth) for c in COLLECTIVE_TESTS
        ]
        return {c.name: c.status for c in collective_checks(everything, peak=1e10)}

    assert checks(0.9e9)["all-reduce over data"] == "WARN"
    assert checks(1.1e9)["all-reduce over data"] == "OK"
    assert checks(0.9e9, n_bytes=2**10)["all-reduce over data"] == "OK"  # latency-bound


# From the last table of nccl-tests' doc/PERFORMANCE.md, src/scatter.cu and src/sendrecv.cu.
@pytest.mark.parametrize(
    ("name", "factor"),
    [
        ("all-reduce", 2 * 7 / 8), ("reduce-scatter", 7 / 8), ("all-gather", 7 / 8),
        ("all-to-all", 7 / 8), ("collective-permute", 1),
    ],
)  # fmt: skip
def test_bus_bandwidth_matches_the_definition_of_nccl_tests(name, factor):
    assert ring_bytes(name, 1.0, 8) == pytest.approx(factor)
