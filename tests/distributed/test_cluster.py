import pytest

from jaxgpt.config import UsageError
from jaxgpt.distributed import cluster as cluster_module
from jaxgpt.distributed.cluster import (
    MPI_VARIABLES,
    Cluster,
    cpu_devices_per_process,
    find_cluster,
)


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for variable in (*MPI_VARIABLES, "JAX_NUM_CPU_DEVICES"):
        monkeypatch.delenv(variable, raising=False)


def test_without_a_launcher_mpi_is_not_touched(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "mpi4py", None)  # importing it would fail
    cluster = find_cluster()
    assert (cluster.rank, cluster.size, cluster.is_main) == (0, 1, True)
    assert cluster.broadcast({"a": [1]}) == {"a": [1]}
    with pytest.raises(UsageError, match="wrong"):
        cluster.agree("wrong")


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
    assert cpu_devices_per_process(mesh, Cluster("test", size=processes)) == devices


def test_the_environment_decides_where_it_is_set(monkeypatch):
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "3")
    assert cpu_devices_per_process((2, 1, 4), Cluster("test")) == 3


@pytest.mark.parametrize("value", ["abc", "0", "-1"])
def test_a_number_of_devices_that_is_none_is_refused(monkeypatch, value):
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", value)
    with pytest.raises(UsageError, match=f"JAX_NUM_CPU_DEVICES={value}"):
        cpu_devices_per_process((2, 1, 4), Cluster("test"))


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
    monkeypatch, visible, local_rank, local_size, devices
):
    monkeypatch.setattr(cluster_module, "accelerator_expected", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    cluster = Cluster("test", local_rank=local_rank, local_size=local_size)
    assert cluster_module._own_devices(cluster) == devices


def test_processes_must_divide_the_mesh():
    with pytest.raises(UsageError, match="parallel.mesh=2,1,4: .*8 devices.*3 processes"):
        cpu_devices_per_process((2, 1, 4), Cluster("test", size=3))


def test_a_missing_mpi_library_is_explained(monkeypatch):
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setitem(__import__("sys").modules, "mpi4py", None)
    with pytest.raises(UsageError, match=r"PMI_RANK=0: .*jaxgpt\[mpi\]"):
        find_cluster()
