import pytest

from jaxgpt.cluster.machines import MACHINES, find_machine, high_speed_name
from jaxgpt.perf.hardware import DEVICES


def name(host, **environ):
    machine = find_machine(host, environ)
    return machine and machine.name


@pytest.mark.parametrize(
    ("host", "machine"),
    [
        # Names from ALCF's and OLCF's documentation and from logs of jobs.
        ("x3005c0s37b0n0", "Polaris"),
        ("x3212c0s37b1n0.hsn.cm.polaris.alcf.anl.gov", "Polaris"),
        ("polaris-login-02", "Polaris"),
        ("x3200c0s19b1n0.hsn.cm.sirius.alcf.anl.gov", "Sirius"),
        ("x3200c0s13b1n0", "Sirius"),
        ("x4407c6s2b0n0", "Aurora"),
        ("x4707c7s6b0n0.hostmgmt2707.cm.aurora.alcf.anl.gov", "Aurora"),
        ("aurora-uan-0009", "Aurora"),
        ("x1921c1s4b0n0.hostmgmt2000.cm.americas.sgi.com", "Sunspot"),
        ("sophia-gpu-11.lab.alcf.anl.gov", "Sophia"),
        ("frontier00144", "Frontier"),
        # What only looks like them: laptops, other clusters, ALCF's Crux.
        ("x1carbon", None),
        ("x3950", None),
        ("x4407c6s2b0n0.some.other.site", None),
        ("x1000c0s0b0n0", None),
        ("x3300c0s1b0n0", None),
        ("nid001234", None),
        ("login01", None),
        ("frontier-lab-pc", None),
        ("auroras-laptop", None),
        ("localhost", None),
    ],
)
def test_host_names_tell_the_machine(host, machine):
    assert name(host) == machine


@pytest.mark.parametrize(
    ("variable", "value", "machine"),
    [
        ("NERSC_HOST", "perlmutter", "Perlmutter"),
        ("SLURM_CLUSTER_NAME", "perlmutter", "Perlmutter"),
        ("LMOD_SYSTEM_NAME", "frontier", "Frontier"),
        ("SLURM_CLUSTER_NAME", "frontier", "Frontier"),
        ("PBS_JOBID", "12459205.sunspot-pbs-0001.head.cm.sunspot.alcf.anl.gov", "Sunspot"),
        ("PBS_JOBID", "192796.sophia-pbs-01.lab.alcf.anl.gov", "Sophia"),
        ("PBS_JOBID", "12345.crux-pbs-0001.head.cm.crux.alcf.anl.gov", None),
        ("PBS_O_HOST", "sirius-uan-0002.hsn.cm.sirius.alcf.anl.gov", "Sirius"),
        ("NERSC_HOST", "muller", None),
        ("SLURM_CLUSTER_NAME", "cluster", None),
    ],
)
def test_a_variable_tells_where_a_name_does_not(variable, value, machine):
    assert name("nid001234", **{variable: value}) == machine


def test_a_job_of_sirius_is_not_one_of_polaris():
    """If a job submits another job, PBS_O_HOST is a host of the first one."""
    assert name("x3005c0s37b0n0", PBS_O_HOST="sirius-login-01") == "Sirius"
    job = "77.sirius-pbs-01.hsn.cm.sirius.alcf.anl.gov"
    assert name("x3005c0s37b0n0", PBS_JOBID=job, PBS_O_HOST="x3005c0s37b0n0") == "Sirius"


@pytest.mark.parametrize(
    ("host", "full"),
    [
        ("x3005c0s37b0n0", "x3005c0s37b0n0.hsn.cm.polaris.alcf.anl.gov"),
        ("x4707c7s6b0n0.hostmgmt2707.cm.aurora.alcf.anl.gov",
         "x4707c7s6b0n0.hsn.cm.aurora.alcf.anl.gov"),
        ("x3200c0s19b1n0.hsn.cm.sirius.alcf.anl.gov", "x3200c0s19b1n0.hsn.cm.sirius.alcf.anl.gov"),
        ("frontier00144", "frontier00144"),
    ],
)  # fmt: skip
def test_the_high_speed_network_has_names_of_its_own(host, full):
    assert high_speed_name(find_machine(host, {}), host) == full


def test_every_machine_has_a_device_with_a_known_peak():
    for machine in MACHINES:
        assert DEVICES[machine.device].peak_flops["bfloat16"] > 0


def test_the_table_counts_devices_as_the_machines_documents_do():
    counts = {m.name: m.devices_per_host for m in MACHINES}
    assert counts == {
        "Polaris": 4, "Sirius": 4, "Aurora": 12, "Sunspot": 12, "Sophia": 8, "Frontier": 8,
        "Perlmutter": 4,
    }  # fmt: skip


@pytest.mark.parametrize("machine", [m for m in MACHINES if (m.cpu_bind or "").startswith("list")])
def test_a_binding_gives_each_device_cores_of_one_socket(machine):
    """Aurora has 52 cores per socket; cores 0 and 52 are reserved for the system [ALCF]."""
    groups = [tuple(map(int, g.split("-"))) for g in machine.cpu_bind.split(":")[1:]]
    assert len(groups) == machine.devices_per_host
    cores = [c for first, last in groups for c in range(first, last + 1)]
    assert len(cores) == len(set(cores)) == 96 and not {0, 52} & set(cores) and max(cores) < 104
    assert all(first // 52 == last // 52 for first, last in groups)
