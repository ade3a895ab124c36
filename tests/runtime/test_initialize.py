import dataclasses

import jax
import pytest

from jaxgpt.cluster.hardware import VISIBLE_VARIABLES
from jaxgpt.cluster.machines import find_machine
from jaxgpt.cluster.monitor import Monitor
from jaxgpt.cluster.process_group import ProcessGroup
from jaxgpt.config import MeshShape, UsageError
from jaxgpt.runtime import devices as own
from jaxgpt.runtime import initialize as backend
from jaxgpt.runtime.devices import count_devices, cpu_devices_per_process, local_device_ids


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch):
    for variable in (*VISIBLE_VARIABLES, "JAX_NUM_CPU_DEVICES"):
        monkeypatch.delenv(variable, raising=False)


@pytest.mark.parametrize(
    ("mesh", "processes", "devices"),
    [
        ((2, 1, 4), 8, 1),
        ((1, 8, 1), 2, 4),
        ((2, 1, 4), 1, 8),
        ((-1, 1, 1), 4, 1),
        ((-1, 1, 4), 2, 2),
        ((-1, 2, 1), 3, 2),  # a mesh of 3,2,1
        ((-1, 1, 4), 6, 2),  # a mesh of 3,1,4
    ],
)
def test_each_process_simulates_its_share_of_the_mesh(mesh, processes, devices):
    assert (
        cpu_devices_per_process(MeshShape(*mesh), ProcessGroup("test", size=processes)) == devices
    )


def test_the_environment_decides_where_it_is_set(monkeypatch):
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "3")
    assert cpu_devices_per_process(MeshShape(2, 1, 4), ProcessGroup("test")) == 3


@pytest.mark.parametrize("value", ["abc", "0", "-1", "2049", "²"])
def test_a_number_of_devices_that_is_none_is_refused(monkeypatch, value):
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", value)
    with pytest.raises(UsageError, match=f"JAX_NUM_CPU_DEVICES={value}"):
        cpu_devices_per_process(MeshShape(2, 1, 4), ProcessGroup("test"))


@pytest.mark.parametrize("mesh", [(4097, 1, 1), (-1, 1, 4098)])
def test_more_devices_than_a_cpu_simulates_are_refused(mesh):
    with pytest.raises(UsageError, match=rf"parallel.mesh={mesh[0]},1,.*: its 409[78] devices are"):
        cpu_devices_per_process(MeshShape(*mesh), ProcessGroup("test", size=2))
    assert cpu_devices_per_process(MeshShape(4096), ProcessGroup("test", size=2)) == 2048


def test_an_inferred_axis_does_not_hide_too_many_devices():
    with pytest.raises(UsageError, match=r"parallel.mesh=-1,1,4096: its 4096 devices are too many"):
        cpu_devices_per_process(MeshShape(-1, 1, 4096), ProcessGroup("test", size=3))


class Mates(Monitor):
    """A fake in which the other processes contribute `others` once, and then this one's value."""

    def __init__(self, size, others=None):
        super().__init__()
        self.size, self.others = size, others

    def combine(self, value, function):
        if isinstance(value, bool):  # whether accelerators are expected
            return function([value] * self.size)
        others, self.others = self.others or value, None
        return function([value] + [others] * (self.size - 1))


def cluster_of(local_rank, local_size, others=None):
    return ProcessGroup(
        "test",
        size=local_size,
        local_rank=local_rank,
        local_size=local_size,
        hosts=(0,) * local_size,
        monitor=Mates(local_size, others),
    )


@pytest.mark.parametrize("variable", VISIBLE_VARIABLES)
@pytest.mark.parametrize(
    ("visible", "local_rank", "local_size", "devices"),
    [
        ("0,1,2,3", 0, 1, None),  # one process per host takes all
        ("0,1,2,3", 2, 4, [2]),  # one per device
        ("0,1,2,3", 1, 2, [2, 3]),  # two share four
        ("3", 3, 4, None),  # the launcher has given each its own
    ],
)
def test_processes_of_a_host_share_its_devices(
    monkeypatch, variable, visible, local_rank, local_size, devices
):
    monkeypatch.setattr(own, "accelerator_expected", lambda: True)
    monkeypatch.setenv(variable, visible)
    assert local_device_ids(cluster_of(local_rank, local_size)) == devices


def test_devices_that_a_launcher_gave_out_are_not_shared_again(monkeypatch):
    monkeypatch.setattr(own, "accelerator_expected", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert local_device_ids(cluster_of(1, 2, others=[["0", "1"], []])) is None


def test_tasks_with_their_own_cgroups_do_not_share_devices(monkeypatch):
    """Slurm's --gpus-per-task=2: both tasks see their two GPUs as 0 and 1."""
    monkeypatch.setattr(own, "accelerator_expected", lambda: True)
    monkeypatch.setattr(own, "usable_device_files", lambda: ["nvidia2", "nvidia3"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    theirs = [["0", "1"], ["nvidia0", "nvidia1"]]
    assert local_device_ids(cluster_of(1, 2, others=theirs)) is None
    assert count_devices(MeshShape(-1), cluster_of(1, 2, others=theirs)) == 4


@pytest.mark.parametrize(("local_rank", "devices"), [(0, [0]), (1, [1]), (2, [0]), (3, [1])])
def test_processes_that_see_the_same_devices_share_them(monkeypatch, local_rank, devices):
    """Two launchers on one host each give two devices to their two processes."""
    monkeypatch.setattr(own, "accelerator_expected", lambda: True)
    visible = ["0,1", "0,1", "2,3", "2,3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible[local_rank])
    seen = [[theirs.split(","), []] for theirs in visible]
    monkeypatch.setattr(
        ProcessGroup, "allgather", lambda self, x: seen if x == seen[local_rank] else [x] * 4
    )
    assert local_device_ids(cluster_of(local_rank, 4)) == devices


@pytest.mark.parametrize(
    ("visible", "local_size", "mesh", "total"),
    [
        ("0,1,2,3", 1, MeshShape(-1), 4),  # one process takes all
        ("0,1,2,3", 4, MeshShape(-1), 4),  # one device per process
        ("0,1,2,3", 2, MeshShape(1, -1, 2), 4),
        ("3", 4, MeshShape(-1), 4),  # the launcher has given each its own
        ("0,1,2,3", 2, MeshShape(4, 1, 2), 8),  # the mesh names all devices
    ],
)
def test_devices_are_counted_before_jax_starts(monkeypatch, visible, local_size, mesh, total):
    monkeypatch.setattr(own, "accelerator_expected", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert count_devices(mesh, cluster_of(0, local_size)) == total


@pytest.mark.parametrize(
    ("mesh", "processes", "total"),
    [(MeshShape(-1), 8, 8), (MeshShape(-1), 1, 1), (MeshShape(-1, 2, 2), 6, 12)],
)
def test_simulated_devices_are_counted(mesh, processes, total):
    assert count_devices(mesh, ProcessGroup("test", size=processes)) == total


def test_on_aurora_each_process_sees_its_own_tile(monkeypatch):
    monkeypatch.setattr(own, "accelerator_expected", lambda: True)
    monkeypatch.setattr(own, "count_accelerators", lambda only_usable: 0)
    monkeypatch.setenv("ZE_AFFINITY_MASK", "")
    aurora = find_machine("x4407c6s2b0n0", {})
    cluster = dataclasses.replace(cluster_of(7, 12), machine=aurora)
    assert local_device_ids(cluster) == [7]
    assert backend.os.environ["ZE_AFFINITY_MASK"] == "7"


def test_a_plugin_that_gives_no_devices_is_not_passed_over(monkeypatch):
    """JAX logs why it cannot start a plugin and continues with CPUs."""
    monkeypatch.setattr(own, "accelerator_expected", lambda: True)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setattr(backend, "reserve_gpu_memory", lambda: [])
    with pytest.raises(
        UsageError, match="devices: this host has accelerators, .*JAX_PLATFORMS=cpu"
    ):
        backend.initialize_jax(cluster_of(0, 1), MeshShape())
    assert backend.initialize_jax(cluster_of(0, 1), MeshShape(), allow_cpu=True)["devices"]


@pytest.mark.parametrize("mesh", [MeshShape(-1), MeshShape(2)])
def test_a_host_without_the_accelerators_of_the_others_is_named(mesh, monkeypatch):
    class OneWithout(Monitor):
        def combine(self, value, function):
            return function([True, False])

    names = {"hosts": (0, 1), "host_names": ("n1", "n2")}
    cluster = ProcessGroup("test", size=2, monitor=OneWithout(), **names)
    with pytest.raises(
        UsageError, match="^no accelerators are visible to process 1 on host n2, but"
    ):
        backend.initialize_jax(cluster, mesh)


def test_more_processes_than_devices_are_refused(monkeypatch):
    monkeypatch.setattr(own, "accelerator_expected", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    with pytest.raises(UsageError, match="=5: more than its 4 devices"):
        local_device_ids(cluster_of(4, 5))


def test_proxies_are_cleared_and_named(monkeypatch):
    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    monkeypatch.setenv("HTTP_PROXY", "http://proxy:3128")
    (line,) = backend.clear_proxies()
    assert "HTTP_PROXY" in line and "https_proxy" in line
    assert not {"https_proxy", "HTTP_PROXY"} & set(backend.os.environ)


@pytest.mark.parametrize(
    ("name", "value"),
    [("jax_enable_x64", True), ("jax_disable_jit", True), ("jax_default_prng_impl", "rbg"),
     ("jax_random_seed_offset", 7), ("jax_threefry_partitionable", False),
     ("jax_numpy_dtype_promotion", "strict")],
)  # fmt: skip
def test_settings_of_jax_do_not_change_results(name, value):
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        facts = backend.initialize_jax(ProcessGroup("test"), MeshShape(8))
        assert getattr(jax.config, name) == before
    finally:
        jax.config.update(name, before)
    assert facts["notes"] == [
        f"warning: {name.upper()}={value}: set to {before}, as it affects results"
    ]


def test_processes_must_divide_the_mesh():
    with pytest.raises(UsageError, match="parallel.mesh=2,1,4: .*8 devices.*3 processes"):
        cpu_devices_per_process(MeshShape(2, 1, 4), ProcessGroup("test", size=3))


def test_cluster_json_names_the_job_and_its_host_file(monkeypatch):
    monkeypatch.setenv("PBS_JOBID", "12.pbs")
    monkeypatch.setenv("PBS_NODEFILE", "/var/spool/pbs/aux/12.pbs")
    facts = backend.initialize_jax(ProcessGroup("test"), MeshShape(8))
    assert (facts["scheduler"], facts["job"]) == ("PBS", "12.pbs")
    assert facts["host_file"] == "/var/spool/pbs/aux/12.pbs"
    assert facts["processes"] == 1 and facts["devices"] == 8
