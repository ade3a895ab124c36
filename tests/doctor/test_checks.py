"""Each check finds its fault in the facts of an otherwise healthy job."""

import dataclasses
import json
from types import SimpleNamespace

import jax
import jaxlib
import pytest

from jaxgpt import __version__
from jaxgpt.cluster import hardware
from jaxgpt.cluster.machines import MACHINES
from jaxgpt.cluster.process_group import ProcessGroup
from jaxgpt.doctor import checks as checks_module
from jaxgpt.doctor import facts as facts_module
from jaxgpt.doctor.checks import Check, machine_checks
from jaxgpt.doctor.facts import collect_facts

GIB = 2**30
INSTALLED = {"jaxgpt": __version__, "jax": jax.__version__, "jaxlib": jaxlib.__version__}
BY_NAME = {machine.name: machine for machine in MACHINES}
POLARIS = BY_NAME["Polaris"]
GPU = SimpleNamespace(
    address="10.0.0.2",
    allocated_hosts=2,
    host=0,
    host_name="node0",
    versions={"python": "3.12.1", "MPI": "MPICH 4.1", **INSTALLED},
    platform="gpu",
    device_kind="NVIDIA A100-SXM4-40GB",
    devices=["0"],
    narrowed=False,
    jax_platforms="",
    accelerators=2,
    device_memory=30 * GIB,
    memory=100 * GIB,
    shared_memory=10 * GIB,
    cores=list(range(16)),
    host_cores=32,
)
# Two hosts with two processes each. Every process has its own GPU.
HEALTHY = [
    SimpleNamespace(
        **vars(GPU)
        | {"host": rank // 2 * 2, "host_name": f"node{rank // 2}", "devices": [str(rank % 2)]}
    )
    for rank in range(4)
]
CLUSTER = ProcessGroup(
    "MPICH (PMI_RANK=0)", size=4, hosts=(0, 0, 2, 2), host_names=("node0",) * 2 + ("node1",) * 2
)
FOUND = {"coordinator": "node0.hsn:4711", "notes": []}


@pytest.fixture(autouse=True)
def one_clock(monkeypatch):
    monkeypatch.setattr(checks_module, "check_clocks", lambda cluster: Check("clocks", "OK", ""))


def report(job=HEALTHY, cluster=CLUSTER, found=FOUND):
    """Run all checks; return name -> check."""
    checks = machine_checks(job, cluster, found)
    assert len({c.name for c in checks}) == len(checks)
    return {c.name: c for c in checks}


def changed(rank, **facts):
    """Return a job in which one process differs."""
    return [SimpleNamespace(**vars(f) | facts) if r == rank else f for r, f in enumerate(HEALTHY)]


def everywhere(**facts):
    return [SimpleNamespace(**vars(f) | facts) for f in HEALTHY]


def test_a_healthy_job_passes_all_checks():
    assert {c.status for c in report().values()} == {"OK"}
    assert "4 in all" in report()["devices"].finding
    assert "2 hosts (node0, node1), 2 processes on each" in report()["hosts"].finding


CPU = {"platform": "cpu", "device_kind": "cpu", "device_memory": None}


@pytest.mark.parametrize(
    ("name", "status", "everyone", "finding", "remedy"),
    [
        (
            "versions", "FAIL", changed(3, versions={**GPU.versions, "jaxlib": "0.9"}),
            f"jaxlib differs: {INSTALLED['jaxlib']} on node0, node1, 0.9 on node1",
            "one environment",
        ),
        (
            "versions", "FAIL", changed(2, versions={**GPU.versions, "jax": None}),
            "none on node1", "one environment",
        ),
        ("versions", "FAIL", changed(2, versions={**GPU.versions, "MPI": "Open MPI v5"}),
         "Open MPI v5 on node1", "module"),
        ("hosts", "WARN", HEALTHY[:3], "2 on node0, 1 on node1", "-ppn"),
        ("devices", "FAIL", changed(1, devices=["0", "1"]), "2 x NVIDIA", "same number"),
        ("devices", "FAIL", changed(1, device_kind="NVIDIA H200"), "H200 on node0", "one kind"),
        ("accelerators", "WARN", changed(3, devices=["0"]), "on node1 seem to share device 0",
         "one process per device"),
        ("accelerators", "FAIL", everywhere(**CPU), "node0 has 2 accelerators", "jaxgpt[cuda]"),
        ("accelerators", "FAIL", everywhere(**CPU), "JAX uses the CPU", "jax[rocm7-local]"),
        ("accelerators", "WARN", everywhere(accelerators=4), "2 of the 4 devices",
         "one process per device"),
        ("memory", "WARN", changed(2, memory=GIB), "0.5 GiB of host memory for each process "
         "on node1", "--mem=0"),
        ("cores", "WARN", everywhere(cores=[5]), "2 processes may run on 1 of 32 cores on node0",
         "--cpu-bind"),
        ("shared memory", "WARN", changed(2, shared_memory=2**20), "1 MiB are free", "--shm-size"),
    ],
)  # fmt: skip
def test_each_problem_is_reported_with_a_remedy(name, status, everyone, finding, remedy):
    check = report(everyone)[name]
    assert check.status == status
    assert finding in check.finding
    assert remedy in check.remedy


def test_deliberate_settings_are_not_problems():
    on_cpu = everywhere(jax_platforms="cpu", **CPU)
    assert report(on_cpu)["accelerators"].status == "OK"
    # The job was given two of four GPUs.
    narrowed = everywhere(accelerators=4, narrowed=True)
    assert report(narrowed)["accelerators"].status == "OK"


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
def test_the_remedy_names_the_plugin_of_the_machines_vendor(machine):
    cluster = dataclasses.replace(CLUSTER, machine=machine)
    remedy = report(everywhere(**CPU), cluster)["accelerators"].remedy
    packages = {"a100": "jaxgpt[cuda]", "mi250x": "jax-rocm7-plugin", "pvc": "intel-extension-for-"}
    for device, package in packages.items():
        assert (package in remedy) == (device == machine.device)


def test_a_known_machine_is_expected_to_be_used_in_full():
    on_polaris = dataclasses.replace(CLUSTER, machine=POLARIS)
    assert "2 of the 4 devices" in report(cluster=on_polaris)["accelerators"].finding
    without_files = everywhere(accelerators=0, **CPU)
    assert "has 4 accelerators" in report(without_files, on_polaris)["accelerators"].finding
    check = report(cluster=on_polaris)["interface"]
    assert check.status == "WARN"
    assert POLARIS.high_speed_suffix in check.remedy
    fast = FOUND | {"coordinator": f"x3001{POLARIS.high_speed_suffix}:4711"}
    assert report(cluster=on_polaris, found=fast)["interface"].status == "OK"


def test_problems_with_the_launcher_are_warnings():
    alone = ProcessGroup("single process")
    check = report(HEALTHY[:1], alone)["launcher"]
    assert (check.status, "1 of the 2 hosts" in check.finding) == ("WARN", True)
    check = report(everywhere(allocated_hosts="PBS_NODEFILE=/x: cannot be read"))["launcher"]
    assert (check.status, "/x" in check.finding) == ("WARN", True)
    without_mpi = dataclasses.replace(CLUSTER, notes=("going on without MPI",))
    assert report(cluster=without_mpi)["launcher"].status == "WARN"


def test_the_address_of_the_coordinator_is_reported():
    assert "reached from 10.0.0.2 (node1)" in report()["interface"].finding
    cleared = FOUND | {"notes": ["cleared http_proxy: ..."]}
    assert "http_proxy" in report(found=cleared)["interface"].finding


def test_a_problem_cannot_be_reported_without_a_remedy():
    with pytest.raises(AssertionError):
        Check("x", "FAIL", "broken")


def test_devices_of_several_processes_are_distinguished(monkeypatch):
    """There are four ways in which the processes of a host see its devices."""

    def names(n, chosen, visible, usable):
        monkeypatch.setattr(hardware.glob, "glob", lambda p: usable if "nvidia" in p else [])
        monkeypatch.setattr(hardware.os, "access", lambda path, mode: True)
        return facts_module.device_names(chosen or range(n), visible)

    every = ["/dev/nvidia0", "/dev/nvidia1"]
    one_takes_all = names(2, None, [], every)
    shared_out = names(1, [0], [], every), names(1, [1], [], every)
    by_variable = names(1, None, ["0"], every), names(1, None, ["1"], every)
    by_control_group = names(1, None, ["0"], every[:1]), names(1, None, ["0"], every[1:])
    assert len(set(one_takes_all)) == 2
    for a, b in (shared_out, by_variable, by_control_group):
        assert a != b
    assert names(1, None, ["0"], every) == names(1, None, ["0"], every)


def test_collected_facts_describe_this_process():
    facts = collect_facts(ProcessGroup("test"), "localhost:4711")
    assert facts["versions"]["jax"] == jax.__version__
    assert (facts["platform"], len(facts["devices"])) == ("cpu", 8)
    assert GIB // 4 < facts["memory"] < 2**50
    assert facts["address"] in ("127.0.0.1", "::1")
    assert json.loads(json.dumps(facts)) == facts
